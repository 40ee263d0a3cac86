"""Descriptions of what streaming queries call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

from queen.http.openapi.operation import DATABASE, SEALED, Count, Name, Operation, SnakeAnswer, Uuid
from queen.http.operations.messaging import PushRequestItem, PushResult
from queen.wire.push import LONGEST_NAME
from queen.wire.streams import LONGEST_KEY

_TAG: Final = "Streams"

Key: TypeAlias = Annotated[str, Meta(max_length=LONGEST_KEY)]
Version: TypeAlias = Annotated[
    int | None, Meta(description="The version that the key must still have; null: it must have no state.")
]


class StreamRegistration(Struct):
    """A query: its lasting name, what it reads, and a fingerprint of its operators."""

    name: Name
    source_queue: Name
    config_hash: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    sink_queue: Name | None = None
    reset: Annotated[bool, Meta(description="Drop the state if the fingerprint is another.")] = False


class StreamPartition(SnakeAnswer):
    """A partition for which a query keeps state."""

    partition_id: Uuid
    partition: str


class RegisteredStream(SnakeAnswer):
    """A registered query; `reset` says whether state was dropped."""

    success: bool
    query_id: Uuid
    name: str
    config_hash: str
    fresh: bool
    reset: bool
    partitions: list[StreamPartition]


class StreamConflict(SnakeAnswer):
    """The query is registered with other operators."""

    success: bool
    query_id: Uuid
    name: str
    error: str


class StateUpsert(Struct, tag_field="type", tag="upsert"):
    """Write the state of a key; `{}` without a value."""

    key: Key
    value: Any = None
    if_version: Version | UnsetType = UNSET


class StateDelete(Struct, tag_field="type", tag="delete"):
    """Remove the state of a key."""

    key: Key
    if_version: Version | UnsetType = UNSET


class StreamAck(Struct, rename="camel"):
    """The last message that was read, and how many were."""

    transaction_id: Annotated[str, Meta(min_length=1)]
    lease_id: str | None = None
    status: Literal["completed", "success", "failed", "dlq"] | None = None
    count: Annotated[int, Meta(ge=1)] = 1
    error: str | None = None


class StreamCycle(Struct):
    """What a query made of the messages of one partition."""

    query_id: Uuid
    partition_id: Uuid
    consumer_group: Name | None = None
    state_ops: list[StateUpsert | StateDelete] = []
    push_items: list[PushRequestItem] = []
    ack: StreamAck | None = None
    release_lease: Annotated[
        bool, Meta(description="False: the lease stays, and what was not acknowledged comes again when it ends.")
    ] = True
    config_hash: Annotated[
        str | None, Meta(description="Refuse the cycle when the query has another fingerprint by now.")
    ] = None


class StreamAckResult(SnakeAnswer):
    """What became of the acknowledgment."""

    success: bool
    count: Count
    lease_released: bool
    dlq: bool


class StreamCycleResult(SnakeAnswer):
    """Whether the cycle happened; if not, `error` says why, and nothing of it did.

    `replayed`: it had happened before, and nothing was done again.
    """

    success: bool
    query_id: str
    partition_id: str
    queue_name: str | None = field(name="queueName")
    state_ops_applied: Count
    push_results: list[PushResult]
    ack_result: StreamAckResult | None
    replayed: bool | UnsetType = UNSET
    error: str | UnsetType = UNSET


class StateQuery(Struct):
    """Which state to read; filters that are given must all hold."""

    query_id: Uuid
    partition_id: Uuid
    keys: Annotated[list[str], Meta(description="Only these; all of them when empty.")] = []
    key_prefix: str | None = None
    ripe_at_or_before: Annotated[
        float | None, Meta(description="Only values whose `windowEnd`, in epoch milliseconds, is no later.")
    ] = None
    limit: Annotated[int, Meta(ge=1, description="Read a page of at most so many.")] | None = None
    after: Annotated[str | None, Meta(description="Read on after this key.")] = None


class StateRow(SnakeAnswer):
    """The state of a key; its version is another after every write."""

    key: str
    value: Any
    updated_at: str
    version: int


class StreamState(SnakeAnswer):
    """State by key; `more` when a limit cut it off."""

    success: bool
    rows: list[StateRow]
    more: bool | UnsetType = UNSET


OPERATIONS: Final[Mapping[str, Operation]] = {
    "POST /streams/v1/queries": Operation(
        id="registerStream",
        summary="Register a streaming query",
        description="A name that is known is met again. With another fingerprint it is refused with 409, unless it is "
        "to be reset.",
        tag=_TAG,
        body=StreamRegistration,
        body_example={"name": "totals", "source_queue": "orders", "sink_queue": "order-totals", "config_hash": "9f2c"},
        answers={200: RegisteredStream, 409: StreamConflict},
        errors=DATABASE,
    ),
    "POST /streams/v1/cycle": Operation(
        id="commitStreamCycle",
        summary="Write state, push and acknowledge, all or nothing",
        description="A cycle that cannot be done is answered 200 with `success: false`. One that is sent again under "
        "the same lease, because its answer was lost, succeeds and changes nothing. Duplicates among the items are "
        "passed over.",
        tag=_TAG,
        body=StreamCycle,
        body_example={
            "query_id": "6f1b9a52-0d52-4c84-9d0c-6a2f5f0b7d11",
            "partition_id": "51756565-0000-8000-8000-000000000001",
            "consumer_group": "streams.totals",
            "state_ops": [{"type": "upsert", "key": "tumb:60", "value": {"acc": 3, "windowEnd": 60000}}],
            "push_items": [{"queue": "order-totals", "payload": {"count": 3}}],
            "ack": {"transactionId": "order-1", "leaseId": "019ae0f0-7000-7000-8000-000000000001", "count": 3},
        },
        answers={200: StreamCycleResult},
        errors=SEALED,
    ),
    "POST /streams/v1/state/get": Operation(
        id="readStreamState",
        summary="Read the state of a query on a partition",
        description="More than 100 000 rows are refused; read them in pages, with `limit` and `after`.",
        tag=_TAG,
        body=StateQuery,
        answers={200: StreamState},
        errors=SEALED,
    ),
}
