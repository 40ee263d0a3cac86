"""Descriptions of push, pop, ack, renew and transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

from queen.http.openapi.operation import (
    FOUND,
    SEALED,
    Answer,
    Body,
    Count,
    Name,
    Operation,
    Parameter,
    SnakeAnswer,
    Time,
    Uuid,
)
from queen.http.operations.topics import ItemToEnqueue
from queen.wire.push import DEFAULT_PARTITION, LONGEST_BUFFER_MS, LONGEST_NAME, MOST_BUFFERED
from queen.wire.topics import ItemRef

_TAG: Final = "Messaging"

Status: TypeAlias = Annotated[
    str, Meta(description="`completed` (or `success`), `failed`, `retry` or `dlq`; `completed` when absent.")
]
TransactionId: TypeAlias = Annotated[
    str,
    Meta(max_length=LONGEST_NAME, description="Unique in its partition; made by the server when absent or empty."),
]
TraceId: TypeAlias = Annotated[
    str,
    Meta(
        pattern="^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12})?$",
        description="A UUID, or nothing.",
    ),
]


class PushRequestItem(Body):
    """One message to store."""

    queue: Name
    partition: Name = DEFAULT_PARTITION
    payload: Any = None
    transaction_id: TransactionId = ""
    trace_id: TraceId = ""


class PushRequest(Body):
    """Messages to store, in order; they may name different queues and partitions."""

    items: list[PushRequestItem]
    buffer_ms: Annotated[int, Meta(ge=0, le=LONGEST_BUFFER_MS)] | None = None
    """Keep them on disk for so many milliseconds at most before they go to PostgreSQL."""
    buffer_max: Annotated[int, Meta(ge=0, le=MOST_BUFFERED)] | None = None
    """The same, until so many messages have gathered."""


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

    `partition` and `partitionId` are those of the first message; each message has its own.
    """

    success: bool
    queue: str
    partition: str
    partition_id: str
    lease_id: str
    consumer_group: str
    messages: list[Message]
    partitions_claimed: Count


class Acknowledgment(Body):
    """What became of a message. Without `leaseId`, no lease is checked."""

    transaction_id: Annotated[str, Meta(min_length=1)]
    partition_id: Annotated[str, Meta(min_length=1)]
    lease_id: str | None = None
    status: Status | None = None
    error: str | None = None


class SingleAcknowledgment(Acknowledgment):
    """One acknowledgment, with its group."""

    consumer_group: Name | None = None


class BatchItem(Body):
    """What became of a message of a batch."""

    transaction_id: str
    partition_id: str
    lease_id: str | None = None
    status: Status | None = None
    error: str | None = None


class AcknowledgmentBatch(Body):
    """Acknowledgments of one group, which is named here and not per item."""

    acknowledgments: list[BatchItem]
    consumer_group: Name | None = None


class AckResult(Answer):
    """Whether an acknowledgment was applied, and if not why."""

    index: Count
    transaction_id: str
    success: bool
    error: str | None
    queue_name: str | None
    partition_name: str | None
    lease_released: bool | None
    dlq: bool


class PushOperation(Body, tag_field="type", tag="push"):
    """Store messages; without a payload they carry `{}`."""

    items: list[PushRequestItem]


class AckOperation(Body, tag_field="type", tag="ack"):
    """Acknowledge a message. `failed` makes it a dead letter at once."""

    transaction_id: Annotated[str, Meta(min_length=1)]
    partition_id: Annotated[str, Meta(min_length=1)]
    status: Literal["completed", "success", "failed", "dlq"] | None = None
    consumer_group: Name | None = None
    lease_id: str | None = None
    error: str | None = None


class EnqueueOperation(Struct, tag_field="type", tag="enqueue"):
    """Enqueue items to topics; a duplicate of an `idempotency_key` is answered with the id of the first."""

    items: Annotated[list[ItemToEnqueue], Meta(min_length=1)]


class AckItemOperation(ItemRef, tag_field="type", tag="ackItem"):
    """An item of a topic is done."""


class TransactionRequest(Body):
    """Operations that all happen, or none does."""

    operations: Annotated[list[PushOperation | AckOperation | EnqueueOperation | AckItemOperation], Meta(min_length=1)]


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


class TransactionResult(Answer):
    """Whether the transaction happened; if not, `error` says why, and nothing of it did."""

    transaction_id: Uuid
    success: bool
    results: list[PushDone | AckDone | EnqueueDone | AckItemDone]
    error: str | UnsetType = UNSET


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


_POP_PARAMETERS: Final = (
    Parameter("batch", "Messages to answer at most.", Annotated[int, Meta(ge=1, le=10_000)], 1),
    Parameter("wait", "Wait for messages when there are none.", bool, False),
    Parameter("timeout", "How long to wait, in milliseconds.", Annotated[int, Meta(ge=0)], 30_000),
    Parameter("consumerGroup", "The group that consumes; without it, all consumers share one place.", Name),
    Parameter("autoAck", "Count as completed on delivery.", bool, False),
    Parameter("partitions", "Partitions to take messages from at most.", Annotated[int, Meta(ge=1)], 1),
    Parameter(
        "subscriptionMode",
        "Where a new group begins: `all` at the oldest message, `new` at its first pop.",
        Literal["", "all", "new", "new-only"],
    ),
    Parameter("subscriptionFrom", "Where a new group begins: `now`, or a time.", str),
)

_ID: Final = "019ae0f0-6f2c-7000-8000-000000000001"
_PARTITION: Final = "00000000-0000-8000-8000-000000000001"
_LEASE: Final = "019ae0f0-7000-7000-8000-000000000001"
_POPPED: Final = {
    "success": True,
    "queue": "orders",
    "partition": "Default",
    "partitionId": _PARTITION,
    "leaseId": _LEASE,
    "consumerGroup": "workers",
    "messages": [
        {
            "id": _ID,
            "transactionId": "order-1",
            "traceId": None,
            "data": {"total": 12.5},
            "producerSub": None,
            "createdAt": "2026-04-26T10:59:28.267966Z",
            "partitionId": _PARTITION,
            "partition": "Default",
            "leaseId": _LEASE,
            "consumerGroup": "workers",
        }
    ],
    "partitionsClaimed": 1,
}
_ACKED: Final = [
    {
        "index": 0,
        "transactionId": "order-1",
        "success": True,
        "error": None,
        "queueName": "orders",
        "partitionName": "Default",
        "leaseReleased": True,
        "dlq": False,
    }
]
_POP_DESCRIPTION: Final = (
    "204 when there is nothing. Messages are leased to the caller until they are acknowledged or the lease "
    "ends; meanwhile nobody else of the group gets messages of these partitions."
)
_ACK_DESCRIPTION: Final = (
    "Acknowledging a message as completed consumes everything before it in its partition. `failed` has it delivered "
    "again until the queue's `retryLimit` is used up, then it becomes a dead letter. An item that cannot be applied "
    "is answered `success: false` and costs the others nothing."
)

OPERATIONS: Final[Mapping[str, Operation]] = {
    "POST /api/v1/push": Operation(
        id="push",
        summary="Store messages",
        description="Queues and partitions are made when they are first named. Within the queue's window, a "
        "`transactionId` that its partition has already is answered as `duplicate` and stored once. A 201 means that "
        "every item answered `queued` is durable in PostgreSQL, and every item answered `buffered` on the disk of the "
        "server, from where it goes to PostgreSQL.",
        tag=_TAG,
        body=PushRequest,
        body_example={
            "items": [
                {"queue": "orders", "partition": "Default", "transactionId": "order-1", "payload": {"total": 12.5}}
            ]
        },
        answers={201: list[PushResult]},
        example=[
            {
                "index": 0,
                "transaction_id": "order-1",
                "status": "queued",
                "message_id": _ID,
                "partition_id": _PARTITION,
                "trace_id": None,
                "queueName": "orders",
            }
        ],
        errors=SEALED,
    ),
    "GET /api/v1/pop": Operation(
        id="popFiltered",
        summary="Take messages from every queue of a namespace, of a task, or of both",
        description="Queues of higher priority come first. " + _POP_DESCRIPTION,
        tag=_TAG,
        parameters=(
            Parameter("namespace", "Namespace of the queues; it or `task` is needed.", str),
            Parameter("task", "Task of the queues.", str),
            *_POP_PARAMETERS,
        ),
        answers={200: Popped, 204: None},
        example=_POPPED,
        errors=SEALED,
    ),
    "GET /api/v1/pop/queue/{queue}": Operation(
        id="pop",
        summary="Take messages from any partition of a queue",
        description="The partition that has been ready longest comes first. " + _POP_DESCRIPTION,
        tag=_TAG,
        parameters=_POP_PARAMETERS,
        answers={200: Popped, 204: None},
        example=_POPPED,
        errors=SEALED,
    ),
    "GET /api/v1/pop/queue/{queue}/partition/{partition}": Operation(
        id="popPartition",
        summary="Take messages from one partition",
        description=_POP_DESCRIPTION,
        tag=_TAG,
        parameters=_POP_PARAMETERS,
        answers={200: Popped, 204: None},
        example=_POPPED,
        errors=SEALED,
    ),
    "POST /api/v1/ack": Operation(
        id="ack",
        summary="Acknowledge one message",
        description=_ACK_DESCRIPTION,
        tag=_TAG,
        body=SingleAcknowledgment,
        body_example={
            "transactionId": "order-1",
            "partitionId": _PARTITION,
            "leaseId": _LEASE,
            "status": "completed",
            "consumerGroup": "workers",
        },
        answers={200: list[AckResult]},
        example=_ACKED,
        errors=SEALED,
    ),
    "POST /api/v1/ack/batch": Operation(
        id="ackBatch",
        summary="Acknowledge messages",
        description=_ACK_DESCRIPTION,
        tag=_TAG,
        body=AcknowledgmentBatch,
        body_example={
            "acknowledgments": [{"transactionId": "order-1", "partitionId": _PARTITION, "leaseId": _LEASE}],
            "consumerGroup": "workers",
        },
        answers={200: list[AckResult]},
        example=_ACKED,
        errors=SEALED,
    ),
    "POST /api/v1/transaction": Operation(
        id="transaction",
        summary="Store and acknowledge messages, all or nothing",
        description="A transaction that cannot be done is answered 200 with `success: false`. Unlike in a push, a "
        "`transactionId` that is there already is such a failure.",
        tag=_TAG,
        body=TransactionRequest,
        body_example={
            "operations": [
                {"type": "push", "items": [{"queue": "invoices", "payload": {"order": 1}}]},
                {"type": "ack", "transactionId": "order-1", "partitionId": _PARTITION, "leaseId": _LEASE},
            ]
        },
        answers={200: TransactionResult},
        errors=(*SEALED, 429),
    ),
    "POST /api/v1/lease/{lease}/extend": Operation(
        id="extendLease",
        summary="Keep messages for longer",
        description="Extends the lease on all partitions it holds; 404 when it has ended.",
        tag=_TAG,
        body=Extension,
        body_required=False,
        body_example={"seconds": 60},
        answers={200: Extended},
        errors=FOUND,
    ),
}
