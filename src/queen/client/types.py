"""The dicts that go in and out of the client, for type checkers and readers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar
from urllib.parse import quote, urlencode

QUEUE_MODE = "__QUEUE_MODE__"
"""The group of consumers that name none."""

DEFAULT_PARTITION = "Default"


T_co = TypeVar("T_co", covariant=True)


class Deferred(Coroutine[Any, Any, T_co]):
    """Something that happens when it is awaited, or as a task: `asyncio.create_task` takes nothing but coroutines."""

    __slots__ = ("_steps",)
    _steps: Generator[Any, Any, T_co]

    def send(self, value: Any, /) -> Any:
        return self._started().send(value)

    def throw(self, *error: Any) -> Any:
        return self._started().throw(*error)

    def close(self) -> None:
        self._started().close()

    def _started(self) -> Generator[Any, Any, T_co]:
        try:
            return self._steps
        except AttributeError:
            self._steps = self.__await__()
            return self._steps


class TraceConfig(TypedDict, total=False):
    """What `message["trace"]` is given; `data` is required."""

    traceName: str | list[str] | None
    eventType: str
    data: Any


class Trace(Protocol):
    """Records an event in the life of a message; answers `{"success": bool, ...}` and never raises."""

    async def __call__(self, config: TraceConfig, /) -> dict[str, Any]: ...


class Message(TypedDict, total=False):
    """A message as handlers and `pop()` get it. Those of handlers have `trace`, those of the DLQ the error fields.

    `producerSub` is set by the server from the producer's token; nobody can set it by pushing.
    """

    id: str
    transactionId: str
    partitionId: str
    partition: str
    leaseId: str
    consumerGroup: str
    data: Any
    createdAt: str
    traceId: str | None
    producerSub: str | None
    trace: Trace
    queue: str
    errorMessage: str | None
    retryCount: int
    failedAt: str


class AckResponse(TypedDict, total=False):
    """What became of an acknowledgment."""

    success: bool
    error: str | None
    results: list[dict[str, Any]]
    leaseReleased: bool
    dlq: bool


class RenewResponse(TypedDict, total=False):
    """What became of a renewal."""

    leaseId: str
    success: bool
    newExpiresAt: str
    error: str


class BufferOptions(TypedDict, total=False):
    """When buffered messages are sent, and how much they hold before `push` waits."""

    message_count: int
    time_millis: int
    max_messages: int
    max_bytes: int


class BufferStats(TypedDict):
    """What the client's buffers hold; ages are milliseconds."""

    activeBuffers: int
    totalBufferedMessages: int
    oldestBufferAge: float
    flushesPerformed: int
    failedFlushes: int
    rejectedMessages: int


class DLQResponse(TypedDict):
    """Dead letters, the latest first, and how many there are in all."""

    messages: list[Message]
    total: int


class TransactionResponse(TypedDict, total=False):
    """What a committed transaction did."""

    success: bool
    transactionId: str
    results: list[dict[str, Any]]
    error: str


Given: TypeAlias = str | Mapping[str, Any]
"""A message, or the id that stands for it."""
GivenMany: TypeAlias = Sequence[Mapping[str, Any]] | list[str]
Items: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""What is pushed: `{"data": …, "transactionId"?: …, "traceId"?: …}`, one or many."""

Handler: TypeAlias = (
    Callable[[Message], object]
    | Callable[[list[Message]], object]
    | Callable[[dict[str, Any]], object]
    | Callable[[list[dict[str, Any]]], object]
)
"""A function of a message, or of a list of them; what it returns is awaited where that can be done."""
SuccessCallback: TypeAlias = Callable[[Any, Any], Awaitable[object]]
ErrorCallback: TypeAlias = Callable[[Any, Exception], Awaitable[object]]


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
