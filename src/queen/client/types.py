"""Types of arguments and results of the client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar
from urllib.parse import urlencode

from queen.wire.paths import path_of

QUEUE_MODE = "__QUEUE_MODE__"
"""The default consumer group."""

DEFAULT_PARTITION = "Default"


T_co = TypeVar("T_co", covariant=True)


class Deferred(Coroutine[Any, Any, T_co]):
    """An operation that runs when awaited; a coroutine, because `asyncio.create_task` accepts nothing else."""

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
    """Argument of `message["trace"]`; `data` is required."""

    traceName: str | list[str] | None
    eventType: str
    data: Any


class Trace(Protocol):
    """Records a trace event of a message; returns `{"success": bool, ...}` and never raises."""

    async def __call__(self, config: TraceConfig, /) -> dict[str, Any]: ...


class Message(TypedDict, total=False):
    """A delivered message. In handlers it has `trace`, in DLQ responses the error fields.

    `producerSub` is set by the server from the producer's token and cannot be pushed.
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
    """Result of an acknowledgment."""

    success: bool
    error: str | None
    results: list[dict[str, Any]]
    leaseReleased: bool
    dlq: bool


class RenewResponse(TypedDict, total=False):
    """Result of a lease renewal."""

    leaseId: str
    success: bool
    newExpiresAt: str
    error: str


class BufferOptions(TypedDict, total=False):
    """When a buffer is flushed, and its capacity."""

    message_count: int
    time_millis: int
    max_messages: int
    max_bytes: int


class BufferStats(TypedDict):
    """Statistics of the client's buffers; ages in milliseconds."""

    activeBuffers: int
    totalBufferedMessages: int
    oldestBufferAge: float
    flushesPerformed: int
    failedFlushes: int
    rejectedMessages: int


class DLQResponse(TypedDict):
    """A page of dead letters, latest first, and their total number."""

    messages: list[Message]
    total: int


class TransactionResponse(TypedDict, total=False):
    """Result of a transaction."""

    success: bool
    transactionId: str
    results: list[dict[str, Any]]
    error: str
    kvReason: str
    value: Any
    version: int


MessageRef: TypeAlias = str | Mapping[str, Any]
"""A message, or its transaction id or lease id."""
MessageRefs: TypeAlias = Sequence[Mapping[str, Any]] | list[str]
Items: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""One or several items to push: `{"data": …, "transactionId"?: …, "traceId"?: …}`."""

Handler: TypeAlias = (
    Callable[[Message], object]
    | Callable[[list[Message]], object]
    | Callable[[dict[str, Any]], object]
    | Callable[[list[dict[str, Any]]], object]
)
"""A function or coroutine function of a message, or of a list of messages."""
SuccessCallback: TypeAlias = Callable[[Any, Any], Awaitable[object]]
ErrorCallback: TypeAlias = Callable[[Any, Exception], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a pop or a consumer reads, and how."""

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
    conflation: bool = False

    @property
    def affinity_key(self) -> str:
        """Load balancing key: consumers of the same source and group use the same server."""
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
            "conflation": "true" if self.conflation else None,
            "partitions": self.partitions if self.partitions > 1 else None,
        }
        query.update({name: value for name, value in optional.items() if value})
        return f"{self._resource()}?{urlencode(query)}"

    def _resource(self) -> str:
        if self.queue:
            where = path_of("/api/v1/pop/queue", self.queue)
            if self.partition and self.partition != DEFAULT_PARTITION:
                where = path_of(where, "partition", self.partition)
            return where
        if self.namespace or self.task:
            return "/api/v1/pop"
        raise ValueError("Must specify queue, namespace, or task: queen.queue('name'), or .namespace('name')")
