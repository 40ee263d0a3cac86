"""The words of the fluent grammar that choose and configure; each returns the builder for the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from queen.client.consume_words import ConsumeWords
from queen.client.consumer import ConsumeOptions
from queen.client.defaults import QUEUE_DEFAULTS
from queen.client.messages import DEFAULT_PARTITION, BufferOptions
from queen.client.subscription import Subscription


class QueueOptions(ConsumeWords):
    """What has been said about a queue so far."""

    # Defaults live on the class: a builder is made for every push, and sets only what is said.
    _name: str | None = None
    _partition = DEFAULT_PARTITION
    _namespace: str | None = None
    _task: str | None = None
    _group: str | None = None
    _config: Mapping[str, Any] = QUEUE_DEFAULTS
    _buffer: BufferOptions | None = None
    _partitions = 1
    _auto_ack: bool | None = None
    _renew_lease = False
    _renew_interval_millis: int | None = None
    _mode: str | None = None
    _start: str | None = None

    @property
    def name(self) -> str | None:
        """The name of the queue; None when a namespace or a task stands for several."""
        return self._name

    def namespace(self, name: str) -> Self:
        """The namespace to create the queue in; or, without a queue, to pop from."""
        self._namespace = name
        return self

    def task(self, name: str) -> Self:
        """The task to create the queue for; or, without a queue, to pop from."""
        self._task = name
        return self

    def config(self, options: Mapping[str, Any]) -> Self:
        """Options for `create()`, in snake_case or camelCase; the rest is as in `QUEUE_DEFAULTS`."""
        self._config = {**QUEUE_DEFAULTS, **{_snake(name): value for name, value in options.items()}}
        return self

    def partition(self, name: str) -> Self:
        """The ordered lane to push to or to take from."""
        self._partition = name
        return self

    def buffer(self, options: BufferOptions | None = None) -> Self:
        """Gather pushes and send them together; see `BUFFER_DEFAULTS`."""
        self._buffer = options or {}
        return self

    def group(self, name: str) -> Self:
        """The consumer group: its members share the messages, every group gets all of them."""
        self._group = name
        return self

    def partitions(self, count: int) -> Self:
        """How many partitions one pop may take from; they share the batch and one lease."""
        self._partitions = max(1, count)
        return self

    def auto_ack(self, enabled: bool = True) -> Self:
        """For `consume`, whether messages are acknowledged as the handler turns out (they are, by default).

        For `pop`, whether the server takes delivery for done (it does not, by default).
        """
        self._auto_ack = enabled
        return self

    def renew_lease(self, enabled: bool = True, interval_millis: int | None = None) -> Self:
        """Renew leases while the handler works."""
        self._renew_lease = enabled
        self._renew_interval_millis = interval_millis or self._renew_interval_millis
        return self

    def subscription_mode(self, mode: str) -> Self:
        """Where a new group begins: `new` for messages from now on, `all` for everything there is."""
        self._mode = mode
        return self

    def subscription_from(self, start: str) -> Self:
        """Where a new group begins: a time (ISO 8601), or `now`."""
        self._start = start
        return self

    def _subscription(self) -> Subscription:
        return Subscription(
            queue=self._name,
            partition=None if self._partition == DEFAULT_PARTITION else self._partition,
            namespace=self._namespace,
            task=self._task,
            group=self._group,
            batch=self._batch,
            partitions=self._partitions,
            wait=self._wait,
            timeout_millis=self._timeout_millis,
            mode=self._mode,
            start=self._start,
        )

    def _consume_options(self) -> ConsumeOptions:
        return ConsumeOptions(
            batch=self._batch,
            wait=self._wait,
            timeout_millis=self._timeout_millis,
            concurrency=self._concurrency,
            limit=self._limit,
            idle_millis=self._idle_millis,
            auto_ack=self._auto_ack is not False,
            each=self._each,
            renew_lease=self._renew_lease,
            renew_interval_millis=self._renew_interval_millis,
        )

    def _configuration(self) -> dict[str, Any]:
        """The body that creates the queue."""
        options = {_camel(name): value for name, value in self._config.items()}
        return {"queue": self._name, "namespace": self._namespace, "task": self._task, "options": options}


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)
