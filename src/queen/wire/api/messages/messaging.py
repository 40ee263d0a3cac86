"""Structs of push, pop, ack, renew, transaction and consume."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Raw, UnsetType, field

from queen.wire.fields import CLAMPED, Answer, Body, Count, OptionalName, Query, SnakeAnswer, Time, Uuid, WaitMillis
from queen.wire.state.kv import KvReason, KvResult
from queen.wire.state.timers import TimerResult


class PushResult(SnakeAnswer):
    """What became of one item. A `duplicate` carries the id of the message that was there first.

    `buffered` means kept on disk until PostgreSQL takes it; then `queue`, `partition` and `transactionId` name it too.
    """

    status: Literal["queued", "duplicate", "failed", "buffered"]
    queue_name: str = field(name="queueName")
    index: Count
    transaction_id: str
    message_id: Uuid | UnsetType = UNSET
    partition_id: Uuid | UnsetType = UNSET
    trace_id: Uuid | UnsetType | None = UNSET
    error: str | UnsetType = UNSET
    queue: str | UnsetType = UNSET
    partition: str | UnsetType = UNSET
    buffered_id: str | UnsetType = field(default=UNSET, name="transactionId")


class PushCounts(Answer):
    """The outcome of the items of a binary push that requests counts only."""

    count: Count
    queued: Count
    duplicate: Count
    error: Count


class Message(Answer):
    """A message as it is delivered; `data` is the payload that was pushed."""

    id: Uuid
    transaction_id: str
    trace_id: str | None
    data: Any
    producer_sub: str | None
    created_at: Time
    partition_id: Uuid
    partition: str
    lease_id: str
    consumer_group: str


class Popped(Answer):
    """Messages, and the lease that holds their partitions (empty with `autoAck`).

    `partition` and `partitionId` are those of the first message; each message has its own. Where the group gets only
    the newest message of a partition, `conflation` is true; `conflationConflict`: the request asked otherwise.
    A request with conflation is answered so when there are no messages, where others are answered 204.
    """

    success: bool
    queue: str
    partition: str
    partition_id: str
    lease_id: str
    consumer_group: str
    messages: list[Message]
    partitions_claimed: Count
    conflation: bool | UnsetType = UNSET
    conflation_conflict: bool | UnsetType = UNSET


class AckResult(Answer):
    """Whether an acknowledgment was applied, and if not why. `noop`: the message had been consumed before."""

    index: Count
    transaction_id: str
    success: bool
    error: str | None
    queue_name: str | None
    partition_name: str | None
    lease_released: bool | None
    dlq: bool
    noop: bool | UnsetType = UNSET


class PushDone(Answer, tag_field="type", tag="push"):
    """A message that a transaction stored."""

    index: Count
    success: bool
    transaction_id: str
    message_id: Uuid
    partition_id: Uuid
    queue_name: str


class AckDone(Answer, tag_field="type", tag="ack"):
    """A message that a transaction acknowledged."""

    index: Count
    success: bool
    transaction_id: str
    error: str | None
    dlq: bool


class EnqueueDone(Answer, tag_field="type", tag="enqueue"):
    """An item that a transaction enqueued; the id is text."""

    index: Count
    success: bool
    id: str


class AckItemDone(Answer, tag_field="type", tag="ackItem"):
    """An item that a transaction acknowledged."""

    index: Count
    success: bool
    id: str


class KvDone(KvResult, tag_field="type", tag="kv"):
    """What came of an operation on keys."""


class TimerDone(TimerResult, tag_field="type", tag="timer"):
    """What came of an operation on timers."""


OperationResult: TypeAlias = PushDone | AckDone | EnqueueDone | AckItemDone | KvDone | TimerDone


class TransactionResult(Answer):
    """Whether the transaction happened; if not, `error` says why, and nothing of it did.

    The `reason` `kv_precondition` is of an operation at `kv` that was `required` and did not apply: `failedIndex` is
    its place among all operations (each item of a push is one), `kvReason` why; `version` and `value` are of its key.
    `pushed`, `duplicate` and `acked` stand for the results of pushes and acknowledgments where a binary body says so.
    """

    transaction_id: Uuid
    success: bool
    results: list[OperationResult]
    error: str | UnsetType = UNSET
    reason: Literal["kv_precondition"] | UnsetType = UNSET
    failed_index: Count | UnsetType = UNSET
    kv_reason: KvReason | UnsetType = UNSET
    version: Count | UnsetType = UNSET
    value: Raw | UnsetType = UNSET
    pushed: Count | UnsetType = UNSET
    duplicate: Count | UnsetType = UNSET
    acked: Count | UnsetType = UNSET


class Extension(Body):
    """For how long from now a lease is to last; it never becomes shorter."""

    seconds: Annotated[float, Meta(gt=0, le=604800)] = 60


class Extended(Answer):
    """Until when the lease lasts now, under the names that different clients read."""

    index: Count
    lease_id: str
    success: bool
    error: str | None
    expires_at: Time
    new_expires_at: Time
    lease_expires_at: Time = field(name="lease_expires_at")
    renewed: Annotated[int, Meta(ge=1, description="Of how many partitions the lease was renewed.")]


_Batch: TypeAlias = Annotated[
    int, Meta(ge=1, le=10_000, description="Messages to return at most.", extra={CLAMPED: True})
]


class PushQuery(Query):
    """How messages are stored that another producer had pushed before."""

    producer_sub: Annotated[
        str, Meta(description="Who pushed them, in place of the subject of the token. Needs the role admin.")
    ] = ""


class PopQuery(Query):
    """The parameters of a pop. `namespace` and `task` are accepted and not used where a queue is named."""

    batch: _Batch | None = None
    wait: Annotated[bool, Meta(description="Wait for messages when there are none.")] = False
    timeout: WaitMillis | None = None
    consumer_group: Annotated[
        OptionalName, Meta(description="The consumer group; without it, all consumers share one position.")
    ] = ""
    auto_ack: Annotated[bool, Meta(description="Count as completed on delivery.")] = False
    partitions: Annotated[
        int, Meta(ge=1, description="Partitions to take messages from at most.", extra={CLAMPED: True})
    ] = 1
    subscription_mode: Annotated[
        str, Meta(description="Where a new group begins: `all` at the oldest message, `new` at its first pop.")
    ] = ""
    subscription_from: Annotated[str, Meta(description="Where a new group begins: `now`, or a time.")] = ""
    lease_seconds: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=604800,
                description="How long the lease lasts; the queue's `leaseTime` when absent.",
                extra={CLAMPED: True},
            ),
        ]
        | None
    ) = None
    conflation: (
        Annotated[
            bool,
            Meta(
                description="The group gets only the newest message of each partition, and passes over those before. "
                "What its first pop of a queue says stays. Needs a consumer group, and no autoAck."
            ),
        ]
        | None
    ) = None
    frames: Annotated[
        bool, Meta(description="Answer with binary records (`application/x-queen-pop`), where that can be.")
    ] = False
    autopilot: Annotated[bool, Meta(description="A `batch` that is absent is 200, and not DEFAULT_BATCH_SIZE.")] = False
    namespace: Annotated[str, Meta(description="The namespace of the queues.")] = ""
    task: Annotated[str, Meta(description="The task of the queues.")] = ""


class NamespacePopQuery(PopQuery):
    """The parameters of a pop over the queues of a namespace, of a task, or of both: one of them is required."""


class ConsumeQuery(Query):
    """The token of a client that cannot set headers."""

    token: Annotated[str, Meta(description="A bearer token, for clients that cannot set headers.")] = ""
