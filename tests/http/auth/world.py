"""A tenant of a server: a queue, a topic, a streaming query and what is in them; and a good request to every route."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from queen.http.server.message import Route
from tests.support.api import Answer, Api
from tests.support.databases import as_target
from tests.support.topic_api import TopicApi, item, named

SINCE = "2026-01-01T00:00:00Z"


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    path: str
    query: dict[str, Any] = field(default_factory=dict)
    body: Any = None
    data: bytes | None = None

    async def send(self, api: Api) -> Answer:
        return await api.call(self.method, self.path, self.body, data=self.data, **self.query)


class Tenant:
    """Everything of one tenant is named after it. Requests to its things do something, when they are admitted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue, self.group, self.topic = f"{name}.queue", f"{name}-group", f"{name}-topic"
        self._names: dict[str, str] = {}
        self._letter: dict[str, Any] = {}
        self._leased: dict[str, Any] = {}
        self._stream = ""
        self._attempt = str(uuid.uuid4())
        self._item: dict[str, Any] = {}
        self._dead: dict[str, Any] = {}
        self._target: dict[str, Any] = {}

    async def settle(self, api: Api) -> None:
        """Make all that requests will be about; `api` may do everything."""
        topics = TopicApi(api)
        assert api.worker is not None
        self._target = as_target(api.worker.settings.database_dsns[0])
        await api.configure(self.queue, namespace=self.name, task="work", leaseTime=600)
        await api.push(self.queue, 1, 2, 3, ids=[f"{self.name}-{number}" for number in range(3)])
        await api.push(self.queue, "dead", partition="dead", ids=[f"{self.name}-dead"])
        (self._letter,) = await api.pop(self.queue, "dead", consumerGroup=self.group)
        await api.ack([self._letter], "dlq", self.group, error="no good")
        (self._leased,) = await api.pop(self.queue, "Default", consumerGroup=self.group, batch=1)
        # Somebody else's, so that the first partition has something left for a pop.
        await api.push(self.queue, "spare", partition="spare")
        await self._trace().send(api)
        registered = await self._register().send(api)
        self._stream = registered.body["query_id"]
        assert (await self._pipeline().send(api)).status == 200
        assert (await self._stage().send(api)).status == 201
        await topics.configure(self.topic, self.name, max_retries=0, lease_seconds=600)
        await topics.enqueue(*(item(number, self.topic, self.name) for number in range(4)))
        first, self._item = await topics.dequeue(2, self.topic, self.name)
        await topics.nack(first)
        (self._dead,) = await topics.dead(self.topic, self.name)
        self._names = {
            "queue": self.queue,
            "group": self.group,
            "partition": self._leased["partitionId"],
            "transaction": self._leased["transactionId"],
            "lease": self._leased["leaseId"],
            "name": f"{self.name}-trace",
            "timer": "t",
            "namespace": self.queue,
            "key": "k",
            "stream": f"{self.name}-stream",
            "pipeline": f"{self.name}-pipeline",
        }

    def ask(self, route: Route) -> Asked:
        """A good request to a route, about what the tenant has."""
        path = route.pattern
        for name in route.parameters:
            value = "Default" if name == "partition" and "{queue}" in route.pattern else self._names[name]
            path = path.replace(f"{{{name}}}", value)
        pattern = route.pattern.replace("/api/v1/topics", "") if "/api/v1/topics/" in route.pattern else route.pattern
        key = f"{route.method} {pattern}"
        query, body = self._queries().get(key, {}), self._bodies().get(key)
        data = b"qp1" if key == "POST /internal/api/events" else None
        return Asked(route.method, path, query, body, data)

    def _queries(self) -> dict[str, dict[str, Any]]:
        topic = {"namespace": self.name, "topic": self.topic}
        queue = {"queue": self.queue}
        return {
            "GET /api/v1/pop": {"namespace": self.name, "consumerGroup": f"{self.group}-2"},
            "GET /api/v1/pop/queue/{queue}": {"consumerGroup": f"{self.group}-3"},
            "GET /api/v1/pop/queue/{queue}/partition/{partition}": {"consumerGroup": f"{self.group}-4"},
            "GET /api/v1/resources/queues": {"namespace": self.name},
            "GET /api/v1/resources/partitions": queue,
            "GET /api/v1/resources/queues/{queue}/depth": {"group": self.group},
            "GET /api/v1/status/queues": {"namespace": self.name},
            "GET /api/v1/ephemeral/pop": queue | {"group": self.group},
            "GET /api/v1/timers": queue,
            "GET /api/v1/messages": queue,
            "GET /api/v1/messages/search": queue,
            "GET /api/v1/events": {"limit": 1},
            "GET /api/v1/consumer-groups/{group}/queues/{queue}/seek/preview": {"toEnd": True},
            "GET /api/v1/dlq": queue | {"consumerGroup": self.group},
            "DELETE /api/v1/dlq": queue | {"consumerGroup": self.group},
            "GET /api/v1/dlq/report": queue | {"consumerGroup": self.group},
            "GET /api/v1/analytics/queue-lag": queue,
            "GET /api/v1/analytics/queue-ops": queue,
            "GET /api/v1/analytics/queue-parked-replicas": queue,
            "GET /api/v1/analytics/retention": queue,
            "GET /api/v1/analytics/rollup": queue | {"group": self.group},
            "POST /api/v1/messages/{partition}/{transaction}/dlq": {"consumerGroup": self.group},
            "GET /dequeue": topic,
            "GET /dequeue/many": {"namespace": self.name},
            "GET /topics": {"namespace": self.name},
            "GET /api/v1/topics": {"namespace": self.name},
            "GET /dlq": topic,
            "GET /peek": topic,
            "GET /counts": topic,
            "GET /priorities": topic,
            "DELETE /api/v1/topics": topic,
        }

    def _bodies(self) -> dict[str, Any]:
        ack = self._ack()
        ref = named(self._item)
        return {
            "POST /api/v1/push": {"items": [{"queue": self.queue, "payload": 1}]},
            "POST /api/v1/ack": ack | {"consumerGroup": self.group},
            "POST /api/v1/ack/batch": {"acknowledgments": [ack], "consumerGroup": self.group},
            "POST /api/v1/transaction": {
                "operations": [{"type": "push", "items": [{"queue": self.queue, "payload": 1}]}]
            },
            "POST /api/v1/lease/{lease}/extend": {"seconds": 900},
            "POST /api/v1/locks": {"operations": [{"op": "get", "name": self.name}]},
            "POST /api/v1/timers": {
                "operations": [
                    {"op": "schedule", "queue": self.queue, "timerKey": "t", "payload": "MQ==", "delayMs": 600_000}
                ]
            },
            "POST /api/v1/ephemeral/configure": {"queue": self.queue},
            "POST /api/v1/ephemeral/push": {"queue": self.queue, "messages": [{"payload": 1}]},
            "POST /api/v1/ephemeral/ack": {"queue": self.queue, "acks": [{"id": "e:1:p:1"}], "group": self.group},
            "POST /api/v1/ephemeral/reset": {"queue": self.queue},
            "POST /api/v1/fetch": {"entries": [{"queue": self.queue}]},
            "POST /api/v1/partitions/changed": {"entries": [{"queue": self.queue}]},
            "POST /api/v1/kv": {
                "operations": [{"op": "put", "ns": self.queue, "key": "k", "value": 1, "ttlSeconds": 60}]
            },
            "POST /api/v1/configure": {"queue": self.queue, "namespace": self.name, "options": {"leaseTime": 900}},
            "POST /api/v1/consumer-groups/{group}/subscription": {"subscriptionTimestamp": SINCE},
            "POST /api/v1/consumer-groups/{group}/queues/{queue}/seek": {"toEnd": True},
            "POST /api/v1/consumer-groups/{group}/queues/{queue}/seek/undo": {"seekId": 1},
            "POST /api/v1/messages/delete": {"queue": self.queue, "messages": [self._message()]},
            "POST /api/v1/messages/retry": {"queue": self.queue, "messages": [self._message()]},
            "POST /api/v1/messages/dlq": {
                "queue": self.queue,
                "messages": [self._message()],
                "consumerGroup": self.group,
            },
            "POST /api/v1/dlq/retry": {"queue": self.queue, "consumerGroup": self.group},
            "POST /api/v1/traces": self._trace().body,
            "POST /api/v1/system/maintenance": {"enabled": False},
            "POST /api/v1/system/maintenance/pop": {"enabled": False},
            "POST /streams/v1/queries": self._register(hash="other", reset=True).body,
            "POST /streams/v1/cycle": {
                "query_id": self._stream,
                "partition_id": self._names.get("partition"),
                "consumer_group": self.group,
                "state_ops": [{"type": "upsert", "key": "k", "value": 1}],
                "push_items": [{"queue": self.queue, "payload": 1}],
            },
            "POST /streams/v1/state/get": {
                "query_id": self._stream,
                "partition_id": self._names.get("partition"),
                "keys": ["k"],
            },
            "POST /api/v1/stages": self._stage(batch=2).body,
            "POST /api/v1/stages/publish": {
                "run": f"{self.name}-run",
                "batch": 1,
                "attempts": [{"attempt": self._attempt, "messages": 1}],
            },
            "POST /api/v1/stages/abandon": {"run": f"{self.name}-run", "batch": 1},
            "POST /enqueue": [item(1, self.topic, self.name)],
            "POST /ack": ref,
            "POST /nack": ref | {"error": "no good"},
            "POST /extend": ref | {"seconds": 900},
            "POST /release": ref,
            "POST /dlq/delete": named(self._dead),
            "POST /dlq/retry": named(self._dead),
            "POST /configure": {"namespace": self.name, "topic": self.topic, "options": {"max_retries": 7}},
            "POST /pause": {"namespace": self.name, "topic": self.topic},
            "POST /resume": {"namespace": self.name, "topic": self.topic},
            "POST /purge": {"namespace": self.name, "topic": self.topic},
            "PUT /quotas": {"namespace": self.name, "per_minute": 100_000},
            "PUT /modes": {"namespace": self.name, "mode": "buffered"},
            "POST /internal/api/notify": {"queue": self.queue},
            "POST /api/v1/shards/move": {"queue": self.queue, "to": 0},
            # Itself, and in use: it can be tested and compared, and is not copied.
            **{f"POST /api/v1/migration/{what}": self._target for what in ("test-connection", "start", "validate")},
            "POST /api/v1/pipelines/replay": {"archive": "/nowhere"},
            "PUT /api/v1/pipeline-declarations": self._pipeline(trigger="5 seconds").body,
        }

    def _message(self) -> dict[str, Any]:
        return {key: self._letter.get(key) for key in ("partitionId", "transactionId")}

    def _ack(self) -> dict[str, Any]:
        kept = ("transactionId", "partitionId", "leaseId")
        return {key: self._leased.get(key) for key in kept} | {"status": "completed"}

    def _trace(self) -> Asked:
        body = {
            "transactionId": self._leased["transactionId"],
            "partitionId": self._leased["partitionId"],
            "data": {"text": "seen"},
            "traceNames": [f"{self.name}-trace"],
            "consumerGroup": self.group,
        }
        return Asked("POST", "/api/v1/traces", body=body)

    def _register(self, hash: str = "first", *, reset: bool = False) -> Asked:
        body = {
            "name": f"{self.name}-stream",
            "source_queue": self.queue,
            "sink_queue": self.queue,
            "config_hash": hash,
            "reset": reset,
        }
        return Asked("POST", "/streams/v1/queries", body=body)

    def _pipeline(self, trigger: str = "1 second") -> Asked:
        sections = {"sources": {"in": {"queue": "in"}}, "sinks": {"out": {"from": "in", "queue": "out"}}}
        body = {"name": f"{self.name}-pipeline", "declaration": sections | {"trigger": trigger}}
        return Asked("PUT", "/api/v1/pipeline-declarations", body=body)

    def _stage(self, batch: int = 1) -> Asked:
        items = [{"queue": self.queue, "payload": "staged"}]
        body = {"run": f"{self.name}-run", "batch": batch, "attempt": self._attempt, "items": items}
        return Asked("POST", "/api/v1/stages", body=body)
