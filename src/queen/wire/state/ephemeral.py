"""Requests and answers about ephemeral queues: `/api/v1/ephemeral`."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw

from queen.wire.fields import (
    CLAMPED,
    LARGEST_BIGINT,
    Answer,
    Body,
    Count,
    Limit,
    Name,
    Offset,
    OptionalName,
    Query,
    Search,
)
from queen.wire.push import DEFAULT_PARTITION

MOST_MESSAGES: Final = 10_000
NOT_FOUND: Final = "ephemeral_queue_not_found"
_LONGEST_SECONDS: Final = 7 * 86_400

_Bound: TypeAlias = Annotated[int, Meta(ge=1, le=LARGEST_BIGINT)]


class WindowBuffer(Body):
    """A pop that waits is answered when so many messages are there, or so many milliseconds after the first."""

    ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    count: Annotated[int, Meta(ge=0, le=MOST_MESSAGES)] = 0


class EphemeralOptions(Body):
    """What an ephemeral queue holds, and for how long. `policy` says what happens to a push that does not fit."""

    max_bytes: _Bound = 64 << 20
    max_length: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    policy: Literal["reject", "dropOldest"] = "reject"
    ttl_seconds: Annotated[int, Meta(ge=1, le=_LONGEST_SECONDS)] = 3600
    lease_seconds: Annotated[int, Meta(ge=1, le=_LONGEST_SECONDS)] = 60
    retry_limit: Annotated[int, Meta(ge=0, le=1000)] = 3
    window_buffer: WindowBuffer = msgspec.field(default_factory=WindowBuffer)


class EphemeralConfigureBody(Body):
    """Declare a queue; what is not said of it is as for all."""

    queue: Name
    options: EphemeralOptions = msgspec.field(default_factory=EphemeralOptions)


class EphemeralQueueBody(Body):
    """A queue."""

    queue: Name


class EphemeralMessage(Body):
    """One message: any JSON value."""

    payload: Raw


class EphemeralPushBody(Body):
    """Messages for one partition of one queue: all are taken, or none is."""

    queue: Name
    messages: Annotated[list[EphemeralMessage], Meta(max_length=MOST_MESSAGES)]
    partition: Name = DEFAULT_PARTITION


class EphemeralAck(Body):
    """What became of a message. `failed` and `retry` have it delivered again, up to the `retryLimit`."""

    id: Annotated[str, Meta(min_length=1, max_length=1024)]
    status: Literal["completed", "success", "acked", "ok", "failed", "retry"] | None = None
    error: Any = None


class EphemeralAckBody(Body):
    """Acknowledgments of one group."""

    queue: Name
    acks: Annotated[list[EphemeralAck], Meta(max_length=MOST_MESSAGES)]
    group: OptionalName = ""


class EphemeralPopQuery(Query):
    """The parameters of a pop from an ephemeral queue."""

    queue: Annotated[Name, Meta(description="The queue.")]
    partition: Annotated[OptionalName, Meta(description="Only this partition.")] = ""
    batch: Annotated[
        int, Meta(ge=1, le=MOST_MESSAGES, description="Messages to return at most.", extra={CLAMPED: True})
    ] = 1
    wait: Annotated[bool, Meta(description="Wait for messages when there are none.")] = False
    timeout: Annotated[
        int, Meta(ge=0, le=3_600_000, description="How long to wait, in milliseconds.", extra={CLAMPED: True})
    ] = 30_000
    group: Annotated[OptionalName, Meta(description="The consumer group; each gets every message.")] = ""
    auto_ack: Annotated[bool, Meta(description="Count as completed on delivery.")] = False


class EphemeralConfigured(Answer):
    """A queue as it is declared."""

    queue: str
    options: EphemeralOptions


class EphemeralPushed(Answer):
    """How many messages were taken."""

    pushed: Count


class EphemeralDelivered(Answer):
    """A message; `attempts` counts from 1."""

    id: str
    partition: str
    attempts: Annotated[int, Meta(ge=1)]
    payload: Raw


class EphemeralPopped(Answer):
    """Messages; none when there are none."""

    queue: str
    messages: list[EphemeralDelivered]


class EphemeralAckResult(Answer):
    """What came of an acknowledgment.

    `stale`: the message belongs to an earlier life of the queue; `unknown`: it is not leased to the group.
    """

    id: str
    outcome: Literal["acked", "redelivered", "stale", "unknown"]


class EphemeralAcked(Answer):
    """What came of each acknowledgment, in order."""

    results: list[EphemeralAckResult]


class EphemeralReset(Answer):
    """How many messages were dropped."""

    queue: str
    dropped: Count


class EphemeralDeleted(Answer):
    """Whether there was anything of the queue, and whether it had been declared."""

    queue: str
    deleted: bool
    declared: bool


class EphemeralQueue(Answer):
    """An ephemeral queue: how many messages it holds, and bytes of payload."""

    queue: str
    declared: bool
    options: EphemeralOptions
    length: Count
    bytes: Count


class EphemeralQueues(Answer):
    """Ephemeral queues by name, and how many there are."""

    queues: list[EphemeralQueue]
    total: Count


class EphemeralQueuesQuery(Query):
    """Which ephemeral queues are listed; all of them unless `limit` is sent."""

    search: Search = ""
    limit: Limit | None = None
    offset: Offset = 0


class EphemeralPartition(Answer):
    """A partition with messages."""

    partition: str
    length: Count


class EphemeralGroup(Answer):
    """A consumer group: messages that it was not given yet, and those that it was given and has not acknowledged."""

    group: str
    pending: Count
    leased: Count


class EphemeralDepth(EphemeralQueue):
    """The same with its partitions and groups; the group of pops that name none is empty."""

    partitions: list[EphemeralPartition]
    groups: list[EphemeralGroup]
