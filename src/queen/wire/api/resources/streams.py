"""Structs of the routes about streaming queries."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType, field

from queen.wire.api.fields import Count, SnakeAnswer, Time, Uuid
from queen.wire.api.messages.messaging import PushResult


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


class StreamQuery(SnakeAnswer):
    """A query as it was registered last."""

    query_id: Uuid
    name: str
    source_queue: str
    sink_queue: str | None
    config_hash: str
    created_at: Time
    updated_at: Time


class StreamDeleted(SnakeAnswer):
    """A query that is forgotten, and how many rows of state with it."""

    success: bool
    name: str
    state_rows: Count


class StreamConflict(SnakeAnswer):
    """The query is registered with other operators."""

    success: bool
    query_id: Uuid
    name: str
    error: str


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
