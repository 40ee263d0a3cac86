"""Structs of the routes with metrics over time."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from queen.wire.api.monitoring.status import SeenWorker, TimeRange
from queen.wire.fields import Answer, Count, OptionalName, QueueFilter, SnakeAnswer, Time, TimeSpan


class Sampled(SnakeAnswer):
    """A number that goes up and down."""

    avg: float | None
    min: float | None
    max: float | None
    last: float | None


class Cpu(SnakeAnswer):
    """Hundredths of a percent of one core."""

    user_us: Sampled
    system_us: Sampled


class Memory(SnakeAnswer):
    """Of the process."""

    rss_bytes: Sampled
    virtual_bytes: Sampled


class Pool(SnakeAnswer):
    """Connections to PostgreSQL."""

    pool_size: Sampled
    pool_idle: Sampled
    pool_active: Sampled


class ThreadPool(SnakeAnswer):
    """How large it is, and what waits for it."""

    pool_size: Sampled
    queue_size: Sampled


class ThreadPools(SnakeAnswer):
    """`db` are the connections; `system` is always 0."""

    db: ThreadPool
    system: ThreadPool


class Registries(SnakeAnswer):
    """Requests that are being served."""

    response: Sampled


class SystemSample(SnakeAnswer):
    """How a process was."""

    cpu: Cpu
    memory: Memory
    database: Pool
    threadpool: ThreadPools
    registries: Registries
    shared_state: dict[str, Any]


class SystemPoint(Answer):
    """How a process was in one bucket."""

    timestamp: Time
    sample_count: Count
    metrics: SystemSample


class Replica(Answer):
    """A worker over time, oldest first."""

    hostname: str
    port: Count
    worker_id: Count
    time_series: list[SystemPoint]


class SystemMetrics(Answer):
    """CPU, memory and connections of each worker."""

    time_range: TimeRange
    replicas: list[Replica]
    replica_count: Count
    bucket_minutes: Count
    point_count: Count


class WorkerPoint(Answer):
    """What workers counted in one bucket."""

    timestamp: Time
    push_messages: Count
    pop_messages: Count
    ack_messages: Count
    push_requests: Count
    pop_requests: Count
    ack_requests: Count
    jobs_done: Count
    push_per_second: float
    pop_per_second: float
    ack_per_second: float
    avg_event_loop_lag_ms: float | None
    max_event_loop_lag_ms: float | None
    avg_free_slots: float | None
    min_free_slots: float | None
    db_connections: float | None
    avg_job_queue_size: float | None
    max_job_queue_size: float | None
    backoff_size: Count
    avg_lag_ms: float
    max_lag_ms: float
    lag_count: Count
    db_errors: Count
    ack_success: Count
    ack_failed: Count
    dlq_count: Count


class CountingWorker(SeenWorker):
    """A worker that was there, and when it was last seen."""

    backoff_size: Count
    last_seen: Time


class PopLag(Answer):
    """How long messages of a queue had waited when they were popped."""

    queue_name: str
    pop_count: Count
    avg_lag_ms: float
    max_lag_ms: float


class PopLagPoint(PopLag):
    """The same in one minute."""

    bucket_time: Time


class WorkerSummary(Answer):
    """The sums over the time range, and what is pending now."""

    total_push_messages: Count
    total_pop_messages: Count
    total_ack_messages: Count
    total_push_requests: Count
    total_pop_requests: Count
    total_ack_requests: Count
    total_db_errors: Count
    total_ack_failed: Count
    total_dlq: Count
    pending_messages: Count


class WorkerMetrics(Answer):
    """What workers counted; `timeSeries` is newest first."""

    time_range: TimeRange
    bucket_minutes: Count
    point_count: Count
    time_series: list[WorkerPoint]
    workers: list[CountingWorker]
    queues: list[PopLag]
    summary: WorkerSummary


class QueuePoint(Answer):
    """What was counted for a queue in one bucket; `parkedCount` is how many pops waited on average."""

    bucket: Time
    queue_name: str
    push_requests: Count
    push_messages: Count
    pop_messages: Count
    pop_empty: Count
    ack_requests: Count
    ack_success: Count
    ack_failed: Count
    transactions: Count
    partitions_created: Count
    partitions_deleted: Count
    partition_count: Count | None
    avg_lag_ms: float
    max_lag_ms: float
    push_per_second: float
    pop_per_second: float
    ack_per_second: float
    empty_per_second: float
    parked_count: float


class QueueOperations(Answer):
    """What was counted for queues, oldest first; with `busiest`, also for all of them `together`."""

    time_range: TimeRange
    bucket_minutes: Count
    series: list[QueuePoint]
    queues: list[str]
    together: list[QueuePoint] | UnsetType = UNSET


class ParkedPoint(Answer):
    """How many pops waited for a queue at a worker, on average."""

    bucket: Time
    queue_name: str
    hostname: str
    worker_id: Count
    parked_count: float


class ParkedWorker(Answer):
    """A worker at which pops waited."""

    hostname: str
    worker_id: Count


class Parked(Answer):
    """How many pops waited, and where, oldest first."""

    time_range: TimeRange
    bucket_minutes: Count
    series: list[ParkedPoint]
    replicas: list[ParkedWorker]


class Removed(Answer):
    """Messages that were removed, by what removed them; `evictionMsgs` includes those that expired."""

    retention_msgs: Count
    completed_retention_msgs: Count
    eviction_msgs: Count
    total_msgs: Count
    event_count: Count


class RemovedPoint(Removed, kw_only=True):
    """What was removed in one bucket."""

    bucket: Time


class Retention(Answer):
    """What retention, eviction and expiry removed, oldest first."""

    time_range: TimeRange
    bucket_minutes: Count
    series: list[RemovedPoint]
    totals: Removed


class RolledUpQueue(Answer):
    """What was stored in a queue and delivered from it, in one bucket."""

    bucket: Time
    queue_name: str
    messages: Count
    messages_per_second: float
    bytes: Count
    largest_bytes: Count
    partitions: Count
    delivered: Count
    avg_latency_ms: float | None
    max_latency_ms: float | None


class RolledUpGroup(Answer):
    """What a group consumed and gave up on, and the largest lag of the samples, in one bucket."""

    bucket: Time
    queue_name: str
    consumer_group: str
    consumed: Count
    lag_messages: Count | None
    lag_seconds: float | None
    errors: Count


class RolledUp(Answer):
    """What `queen pipeline rollup` made of messages, cursors and dead letters, oldest first."""

    time_range: TimeRange
    bucket_minutes: Count
    queues: list[RolledUpQueue]
    groups: list[RolledUpGroup]


class DatabaseCache(Answer):
    """How often pages were found in memory."""

    database: str
    disk_reads: Count
    cache_hits: Count
    cache_hit_ratio: float


class TableCache(Answer):
    """The same for a table."""

    schema: str
    table: str
    disk_reads: Count
    cache_hits: Count
    cache_hit_ratio: float


class IndexCache(TableCache):
    """The same for an index."""

    index: str


class CacheSum(Answer):
    """The same for all of a kind."""

    disk_reads: Count
    cache_hits: Count
    hit_ratio: float


class CacheSummary(Answer):
    """The same for all tables and all indexes."""

    tables: CacheSum
    indexes: CacheSum


class DeadTuples(Answer):
    """Rows of a table that wait for a vacuum."""

    schema: str
    table: str
    dead_tuples: Count
    live_tuples: Count
    dead_percentage: float
    last_vacuum: Time | None
    last_autovacuum: Time | None


class HotUpdates(Answer):
    """Updates of a table that touched no index."""

    schema: str
    table: str
    total_updates: Count
    hot_updates: Count
    hot_update_percentage: float


class ActiveQuery(Answer):
    """What is being run, and for how many seconds."""

    pid: Count
    duration: float
    state: str | None
    query: str
    wait_event_type: str | None
    wait_event: str | None


class AutovacuumStatus(Answer):
    """How often a table was vacuumed."""

    table: str
    last_autovacuum: Time | None
    dead_tuples: Count
    autovacuum_count: Count
    autoanalyze_count: Count


class BufferConfig(Answer):
    """How many pages the memory holds, and how much that is."""

    shared_buffers: Count
    shared_buffers_size: str


class BufferUsage(Answer):
    """How much of it an object takes."""

    object: str
    buffered_size: str
    buffered_bytes: Count
    percent_of_cache: float


class TableSize(Answer):
    """How much room a table takes."""

    table: str
    total_size: str
    total_size_bytes: Count
    table_size: str
    table_size_bytes: Count
    index_size: str
    index_size_bytes: Count


class PostgresStats(Answer):
    """Statistics of PostgreSQL; `bufferUsage` is empty without the extension pg_buffercache."""

    timestamp: Time
    database: str
    database_cache: DatabaseCache
    table_cache: list[TableCache]
    index_cache: list[IndexCache]
    cache_summary: CacheSummary
    dead_tuples: list[DeadTuples]
    hot_updates: list[HotUpdates]
    active_queries: list[ActiveQuery]
    autovacuum_status: list[AutovacuumStatus]
    buffer_config: BufferConfig
    buffer_usage: list[BufferUsage]
    table_sizes: list[TableSize]
    shards: list[PostgresStats] | UnsetType = UNSET
    """Those of every shard, where there are several."""


class WorkersQuery(TimeSpan):
    """The span of time and the workers that are shown."""

    hostname: Annotated[OptionalName, Meta(description="Only workers of this host.")] = ""
    worker_id: Annotated[int, Meta(ge=0, le=999_999_999, description="Only the worker of this number.")] | None = None


class QueueSeriesQuery(TimeSpan):
    """The span of time and the queue that are shown."""

    queue: QueueFilter = ""


class OperationsQuery(QueueSeriesQuery):
    """The span of time and the queues that are shown."""

    busiest: (
        Annotated[
            int, Meta(ge=0, le=1000, description="Only so many queues, those with the most messages, and all together.")
        ]
        | None
    ) = None


class RollupQuery(QueueSeriesQuery):
    """The span of time, the queue and the consumer group that are shown."""

    group: Annotated[OptionalName, Meta(description="Only this consumer group.")] = ""
