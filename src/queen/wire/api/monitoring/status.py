"""Structs of the routes about the status of the server and its queues."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from queen.wire.api.resources.queues import Counters, QueueInList, QueueOptions, QueueSort
from queen.wire.fields import (
    Answer,
    Count,
    Limit,
    NamespaceFilter,
    OptionalName,
    Order,
    Page,
    Pagination,
    QueueFilter,
    Search,
    TaskFilter,
    Time,
    TimeSpan,
    Uuid,
)

Interval: TypeAlias = Literal["minute", "hour", "day"]


class TimeRange(Answer, rename={"since": "from"}):
    """The time range of the figures."""

    since: Time
    to: Time


class ThroughputPoint(Answer):
    """What happened in one bucket, and how the workers were; process columns are null when they were not sampled."""

    timestamp: Time
    ingested: Count
    processed: Count
    pop_messages: Count
    ingested_per_second: float
    processed_per_second: float
    pop_per_second: float
    avg_lag_ms: float
    max_lag_ms: float
    avg_event_loop_lag_ms: float | None
    max_event_loop_lag_ms: float | None
    min_free_slots: float | None
    db_errors: Count
    ack_failed: Count
    dlq_count: Count
    queen_cpu_user_pct: float | None
    queen_cpu_sys_pct: float | None
    queen_rss_mb: float | None
    db_pool_active: float | None
    db_pool_idle: float | None
    db_pool_size: float | None


class StatusQueue(Answer):
    """A queue that holds messages."""

    id: Uuid
    name: str
    namespace: str
    task: str
    partitions: Count
    total_consumed: Count


class Requests(Answer):
    """Requests within the time range."""

    push: Count
    pop: Count
    ack: Count


class BatchEfficiency(Answer):
    """Messages per request."""

    push: float
    pop: float
    ack: float


class StatusMessages(Answer):
    """Messages now (`total`: ever pushed), and requests within the time range."""

    total: Count
    pending: Count
    processing: Count
    completed: Count
    failed: Count
    dead_letter: Count
    requests: Requests
    batch_efficiency: BatchEfficiency


class Leases(Answer):
    """Leases that are live, how many messages they hold, and how many of these are consumed."""

    active: Count
    partitions_with_leases: Count
    total_batch_size: Count
    total_acked: Count


class TopError(Answer):
    """The most frequent errors of the newest dead letters."""

    error: str
    count: Count


class DeadLetterQueue(Answer):
    """Dead letters there are."""

    total_messages: Count
    affected_partitions: Count
    top_errors: list[TopError]


class SeenWorker(Answer):
    """A worker that was there."""

    hostname: str
    worker_id: Count
    avg_event_loop_lag_ms: float | None
    max_event_loop_lag_ms: float | None
    free_slots: float | None
    db_connections: float | None
    job_queue_size: float | None
    messages_processed: Count
    port: Count


class Errors(Answer):
    """Errors within the time range."""

    db_errors: Count
    ack_failed: Count
    dlq_messages: Count


class StatusView(Answer):
    """How it goes; `throughput` is newest first, `statsAge` how old the numbers of other hosts are, in seconds."""

    time_range: TimeRange
    bucket_minutes: Count
    point_count: Count
    throughput: list[ThroughputPoint]
    queues: list[StatusQueue]
    messages: StatusMessages
    leases: Leases
    dead_letter_queue: DeadLetterQueue
    workers: list[SeenWorker]
    errors: Errors
    stats_age: Count


class ListedQueues(Answer):
    """A page of queues, newest first; here `pending` includes what is being processed."""

    queues: list[QueueInList]
    pagination: Pagination


class WatchedTotals(Counters, kw_only=True):
    """The sums over all partitions."""

    messages: Counters


class WatchedConfig(Answer):
    """Options of a queue."""

    lease_time: Count
    retry_limit: Count
    retry_delay: Count
    ttl: Count | None
    max_queue_size: Count
    dead_letter_queue: bool


class WatchedQueue(Answer):
    """A queue and its options."""

    id: Uuid
    name: str
    namespace: str
    task: str
    priority: int
    created_at: Time
    config: WatchedConfig
    options: QueueOptions
    paused: bool
    paused_groups: list[str]


class WatchedCursor(Answer):
    """What the group that consumed most has consumed."""

    total_consumed: Count
    batches_consumed: Count


class WatchedPartition(Answer):
    """A partition; `messages` and `stats` are the same."""

    id: Uuid
    name: str
    created_at: Time
    messages: Counters
    stats: Counters
    cursor: WatchedCursor
    last_activity: Time | None
    oldest_message: Time | None
    newest_message: Time | None


class QueueStatus(Answer):
    """The statistics of one queue. `next` is the `after` of the next page of partitions."""

    queue: WatchedQueue
    partitions: list[WatchedPartition]
    totals: WatchedTotals
    next: str | None


class QueueMessage(Answer):
    """A message of the queue."""

    id: Uuid
    transaction_id: str
    partition_id: Uuid
    queue_path: str
    queue: str
    partition: str
    status: str
    created_at: Time
    producer_sub: str | None


class StoredPoint(Answer):
    """How many messages that are still stored came in one interval."""

    timestamp: Time
    messages: Count


class StoredByTime(Answer, rename={"data_points": "dataPoints", "since": "from"}):
    """When the messages that are still stored came, oldest first."""

    data_points: list[StoredPoint]
    interval: Interval
    since: Time
    to: Time


class QueuesSpan(TimeSpan):
    """The span of time and the queues that are shown."""

    queue: QueueFilter = ""
    namespace: NamespaceFilter = ""
    task: TaskFilter = ""


class StatusQuery(QueuesSpan):
    """The span of time and the queues that are shown, and whether they are listed."""

    include_queues: Annotated[bool, Meta(description="Whether the queues are listed, and not only counted.")] = True


class StatusQueuesQuery(Page):
    """Which queues are listed."""

    limit: Limit = 100
    namespace: NamespaceFilter = ""
    task: TaskFilter = ""
    search: Search = ""
    sort: QueueSort = "created"
    order: Order = None


class QueueStatusQuery(Page):
    """Which partitions of the queue are shown."""

    include_partitions: Annotated[
        bool, Meta(description="Whether partitions are listed, besides the totals of the queue.")
    ] = True
    after: Annotated[OptionalName, Meta(description="Partitions after this name: `next` of the page before.")] = ""


class QueueMessagesQuery(Page):
    """A page of the messages of a queue."""

    limit: Limit = 50


class StoredQuery(QueuesSpan):
    """The span of time, the queues and the interval that are shown."""

    interval: Annotated[Interval, Meta(description="The length of each data point.")] = "hour"
