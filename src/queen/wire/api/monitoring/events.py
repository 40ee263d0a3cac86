"""Structs of the stream of events."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from queen.wire.fields import CLAMPED, Answer, Count, Query, Time


class EventsQuery(Query):
    """The token of a client that cannot set headers, and how long the stream lasts."""

    token: Annotated[str, Meta(description="A bearer token, for clients that cannot set headers.")] = ""
    limit: (
        Annotated[int, Meta(ge=1, description="The stream ends after so many `counters`.", extra={CLAMPED: True})]
        | None
    ) = None


class LiveRates(Answer):
    """What the workers of this host do, per second."""

    push: float
    pop: float
    ack: float
    failed: float
    dead_letters: float
    requests: float


class LiveTotals(Answer):
    """What they have done since they were started."""

    push_messages: Count
    pop_messages: Count
    ack_messages: Count
    failed: Count
    dead_letters: Count
    requests: Count


class LiveDepth(Answer):
    """What all queues hold, and when that was counted."""

    at: Time
    queues: Count
    partitions: Count
    stored: Count
    pending: Count
    dead_letters: Count


class LiveWorker(Answer):
    """A worker of this host; its numbers are `ageSeconds` old."""

    worker_id: int
    pid: int
    cpu_percent: float
    rss_bytes: int
    loop_lag_ms: float
    parked: int
    in_flight: int
    age_seconds: float


class LiveShard(Answer):
    """Whether the PostgreSQL of a shard is available, and if not, why."""

    shard: int
    up: bool
    reason: str


class LiveMaintenance(Answer):
    """Which maintenance modes are on."""

    push: bool
    pop: bool


class LiveSpool(Answer):
    """What this host has on disk and PostgreSQL has not; `failed` records were refused."""

    messages: Count
    bytes: Count
    failed: Count


class LiveQueue(Answer):
    """Messages per second of a queue."""

    queue: str
    push: float
    pop: float
    ack: float


class LiveView(Answer):
    """Everything that is counted, once a second. 99 % of pushes took at most `pushLatencyMs`."""

    at: Time
    rates: LiveRates
    totals: LiveTotals
    parked: int
    in_flight: int
    push_latency_ms: float | None
    depth: LiveDepth | None
    workers: list[LiveWorker]
    shards: list[LiveShard]
    maintenance: LiveMaintenance
    spool: LiveSpool
    queues: list[LiveQueue]


class QueueEvent(Answer):
    """A queue was made, deleted, or changed: its options, or that it is paused."""

    queue: str
    change: Literal["created", "changed", "deleted"]


class GroupEvent(Answer):
    """A group was moved, subscribed or deleted."""

    group: str


class TopicEvent(Answer):
    """A topic was changed or deleted."""

    namespace: str
    topic: str


class QuotaEvent(Answer):
    """The quota of a namespace was changed."""

    namespace: str


class DeadLetterEvent(Answer):
    """Messages of a queue became dead letters."""

    queue: str
    count: Count
