"""Structs of the routes about queues."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from queen.errors import BadRequest
from queen.wire.decode import decode_fields
from queen.wire.fields import (
    LARGEST_BIGINT,
    LARGEST_INT,
    Answer,
    Body,
    Count,
    Limit,
    Name,
    NamespaceFilter,
    Offset,
    OptionalName,
    Order,
    Page,
    Pagination,
    Query,
    Search,
    Seconds,
    TaskFilter,
    Time,
    Uuid,
)
from queen.wire.options import read_options
from queen.wire.push import check_name


class QueueOptions(msgspec.Struct, rename="camel", forbid_unknown_fields=True, omit_defaults=False):
    """Options of a queue. An option that is null or absent has its default."""

    priority: Annotated[int, Meta(ge=0, le=LARGEST_INT)] | None = 0
    lease_time: Seconds | None = 300
    retry_limit: Annotated[int, Meta(ge=0, le=LARGEST_INT)] | None = 3
    retry_delay: Annotated[int, Meta(ge=0, le=LARGEST_INT, description="Milliseconds")] | None = 1000
    max_size: Annotated[int, Meta(ge=0, le=LARGEST_BIGINT, description="Messages")] | None = 0
    ttl: Seconds | None = None
    dead_letter_queue: bool | None = False
    dlq_after_max_retries: bool | None = False
    delayed_processing: Seconds | None = 0
    window_buffer: Seconds | None = 0
    retention_seconds: Seconds | None = 0
    completed_retention_seconds: Seconds | None = 0
    retention_enabled: bool | None = False
    encryption_enabled: bool | None = False
    max_wait_time_seconds: Seconds | None = 0
    dedup_window_seconds: Seconds | None = None


class Configuration(Body):
    """A queue and all its options: what is not sent gets its default."""

    queue: Name
    namespace: OptionalName | None = None
    task: OptionalName | None = None
    options: QueueOptions | None = None


class Configured(Answer):
    """The queue as it is now; `partitionId` is that of its `Default` partition."""

    configured: bool
    queue_id: Uuid
    partition_id: Uuid
    queue: str
    namespace: str
    task: str
    options: QueueOptions


QueueSort: TypeAlias = Annotated[
    Literal["created", "name", "partitions", "stored", "pending", "density", "lag"],
    Meta(
        description="What they are sorted by: `name` ascending, all others descending; `density` is messages stored by "
        "partition, `lag` the seconds that the group furthest behind is so."
    ),
]
PartitionSort: TypeAlias = Annotated[
    Literal["name", "stored", "newest"],
    Meta(description="What they are sorted by: `name` ascending, the others descending, and of one queue alone."),
]


class QueuesQuery(Query):
    """Which queues are listed; all of them unless `limit` or `offset` is sent."""

    namespace: NamespaceFilter = ""
    task: TaskFilter = ""
    search: Search = ""
    sort: QueueSort = "created"
    order: Order = None
    limit: Limit | None = None
    offset: Offset | None = None


class PartitionsQuery(Page):
    """Which partitions are listed."""

    queue: Annotated[OptionalName, Meta(description="Only partitions of this queue.")] = ""
    search: Search = ""
    sort: PartitionSort = "name"
    order: Order = None


class QueuePartitionsQuery(Query):
    """Which partitions of a queue are shown."""

    limit: Limit = 1000
    after: Annotated[OptionalName, Meta(description="Partitions after this name: `next` of the page before.")] = ""


class ClearQuery(Query):
    """What is cleared."""

    partition: Annotated[OptionalName, Meta(description="Only this partition.")] = ""


class Deleted(Answer):
    """`existed` says whether there was such a queue."""

    deleted: bool
    queue: str
    existed: bool


class Cleared(Answer):
    """How many messages were removed."""

    cleared: bool
    queue: str
    partition: str | None
    messages: Count


class Paused(Answer):
    """Whether a queue delivers nothing for now, and whether that is a change."""

    success: bool
    queue: str
    paused: bool
    changed: bool


class ShortCounters(Answer):
    """Messages of a queue; `pending` leaves out what is being processed."""

    total: Count
    pending: Count
    processing: Count


class QueueInList(Answer):
    """A queue and what it holds; while it is `paused`, nothing is delivered from it.

    What a queue of very many partitions holds was counted at `countedAt`; without it, just now. Where queues are sorted
    by lag, `maxTimeLag` is that of a queue that a group reads, in seconds.
    """

    id: Uuid
    name: str
    namespace: str
    task: str
    created_at: Time
    partitions: Count
    messages: ShortCounters
    paused: bool
    counted_at: Time | UnsetType = UNSET
    max_time_lag: Count | UnsetType = UNSET


class QueueList(Answer):
    """Queues, newest first; with `limit` or `offset` a page of them."""

    queues: list[QueueInList]
    total: Count | UnsetType = UNSET
    pagination: Pagination | UnsetType = UNSET


class Counters(Answer):
    """Messages by what has become of them; with several groups, as the one sees it that is furthest behind."""

    total: Count
    pending: Count
    processing: Count
    completed: Count
    failed: Count
    dead_letter: Count


class PartitionView(Answer):
    """A partition and what it holds."""

    id: Uuid
    name: str
    created_at: Time
    stats: Counters
    oldest_message: Time | None
    newest_message: Time | None


class PartitionInList(PartitionView):
    """A partition of any queue."""

    queue: str


class QueueView(Answer):
    """A queue with its partitions, by name. `next` is the `after` of the next page of them.

    `totals` are those of the queue, whatever part of its partitions is shown.
    """

    id: Uuid
    name: str
    namespace: str
    task: str
    created_at: Time
    partitions: list[PartitionView]
    totals: Counters
    next: str | None
    paused: bool
    paused_groups: list[str]


class PartitionDepth(Answer):
    """A partition, and how many of its messages are still to be consumed."""

    partition: str
    pending: Count


class QueueDepth(Answer):
    """How many messages a queue stores, and how many of them each consumer group has not consumed yet.

    `pending` is what `group` has not consumed; without one, what the slowest group of each partition has not.
    `conflation` says that `group` gets only the newest message of each partition; then `effectivePending`, how many
    messages it will get, is the number of partitions with a backlog, and otherwise the same as `pending`.
    `partitions` are up to 1000 of those with a backlog, the largest first.
    """

    queue: str
    depth: Count
    groups: dict[str, Count]
    group: str | None
    pending: Count
    partitions_pending: Count
    conflation: bool
    effective_pending: Count
    partitions: list[PartitionDepth]


class DepthQuery(Query):
    """The consumer group whose backlog is requested."""

    group: Annotated[OptionalName, Meta(description="Only this consumer group.")] = ""


class PartitionList(Answer):
    """A page of partitions."""

    partitions: list[PartitionInList]
    total: Count
    pagination: Pagination


class LabelCounters(Answer):
    """Messages of a namespace or task."""

    total: Count
    pending: Count


class NamespaceView(Answer):
    """A namespace and what it holds."""

    namespace: str
    queues: Count
    partitions: Count
    messages: LabelCounters


class NamespaceList(Answer):
    """Namespaces, by name."""

    namespaces: list[NamespaceView]


class TaskView(Answer):
    """A task and what it holds."""

    task: str
    queues: Count
    partitions: Count
    messages: LabelCounters


class TaskList(Answer):
    """Tasks, by name."""

    tasks: list[TaskView]


class Spread(Answer):
    """Of a number over all groups and partitions."""

    avg: float
    median: float
    min: float
    max: float


class Lag(Answer):
    """How far consumers are behind: `time` in seconds, `offset` in messages."""

    time: Spread
    offset: Spread


class Throughput(Answer):
    """Over the last five minutes."""

    ingested_per_second: float
    processed_per_second: float


class Overview(Answer):
    """Everything at once, read live (`statsAge` is always 0)."""

    queues: Count
    partitions: Count
    namespaces: Count
    tasks: Count
    messages: Counters
    lag: Lag
    throughput: Throughput
    timestamp: Time
    stats_age: int


class PartitionsUpdated(Answer):
    """Of how many partitions the numbers are."""

    partitions_updated: Count


class QueuesUpdated(Answer):
    """Of how many queues the numbers are."""

    queues_updated: Count


class NamespacesUpdated(Answer):
    """Of how many namespaces the numbers are."""

    namespaces_updated: Count


class TasksUpdated(Answer):
    """Of how many tasks the numbers are."""

    tasks_updated: Count


class SystemUpdated(Answer):
    """Always 1."""

    system_updated: Count


class Refreshed(Answer):
    """Numbers are always read live, so this only says of how many objects they are."""

    partition: PartitionsUpdated
    queue: QueuesUpdated
    namespace: NamespacesUpdated
    task: TasksUpdated
    system: SystemUpdated
    cleanup: dict[str, Any]


def decode_configuration(body: bytes) -> Configuration:
    """The body of `POST /api/v1/configure`. Raises `BadRequest` for the first bad field."""
    sent = decode_fields(body, Configuration)
    name = sent.get("queue")
    if not isinstance(name, str) or not name:
        raise BadRequest("queue is required")
    check_name(name, "Queue", "queue")
    return Configuration(
        name, _label(sent, "namespace"), _label(sent, "task"), read_options(QueueOptions, sent.get("options"))
    )


def _label(sent: dict[str, Any], key: str) -> str:
    """A namespace or task: text; null and nothing mean none."""
    value = sent.get(key)
    if value is None or value == "":
        return ""
    if not isinstance(value, str):
        raise BadRequest(f"{key} must be a string (at {key})")
    check_name(value, key.capitalize(), key)
    return value
