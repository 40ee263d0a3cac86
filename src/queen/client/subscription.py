"""What is popped: which queues, for which group, how much at a time."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, urlencode

from queen.client.messages import DEFAULT_PARTITION, QUEUE_MODE


@dataclass(frozen=True, slots=True)
class Subscription:
    """The source of a pop or a consumer."""

    queue: str | None
    partition: str | None
    namespace: str | None
    task: str | None
    group: str | None
    batch: int
    partitions: int
    wait: bool
    timeout_millis: int
    mode: str | None
    start: str | None

    @property
    def affinity_key(self) -> str:
        """What decides between several servers: those who pop the same come to the same one."""
        group = self.group or QUEUE_MODE
        if self.queue:
            return f"{self.queue}:{self.partition or '*'}:{group}"
        return f"{self.namespace or '*'}:{self.task or '*'}:{group}"

    def path(self, batch: int, timeout_millis: int, auto_ack: bool) -> str:
        """The path and query that pop it."""
        query: dict[str, str | int] = {
            "batch": batch,
            "wait": "true" if self.wait else "false",
            "timeout": timeout_millis,
        }
        optional = {
            "consumerGroup": self.group,
            "namespace": self.namespace,
            "task": self.task,
            "autoAck": "true" if auto_ack else None,
            "subscriptionMode": self.mode,
            "subscriptionFrom": self.start,
            "partitions": self.partitions if self.partitions > 1 else None,
        }
        query.update({name: value for name, value in optional.items() if value})
        return f"{self._resource()}?{urlencode(query)}"

    def _resource(self) -> str:
        if self.queue:
            where = f"/api/v1/pop/queue/{quote(self.queue, safe='')}"
            if self.partition and self.partition != DEFAULT_PARTITION:
                where += f"/partition/{quote(self.partition, safe='')}"
            return where
        if self.namespace or self.task:
            return "/api/v1/pop"
        raise ValueError("Must specify queue, namespace, or task: queen.queue('name'), or .namespace('name')")
