"""Descriptions of what concerns whole queues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from queen.broker.queues import OPTIONS, Option
from queen.http.openapi.operation import (
    DATABASE,
    FOUND,
    Answer,
    Count,
    Name,
    Operation,
    OptionalName,
    Pagination,
    Parameter,
    Time,
    Uuid,
    paging,
)

_TAG: Final = "Queues"


def _option_sent(option: Option) -> tuple[str, Any, Any]:
    number = Annotated[int, Meta(ge=0, le=option.largest, description=option.unit.capitalize() or "A number")]
    return option.name, (bool if isinstance(option.default, bool) else number) | None, option.default


def _option_echoed(option: Option) -> tuple[str, Any]:
    if isinstance(option.default, bool):
        return option.name, bool
    always = option.default is not None or option.shown is not None
    return option.name, Count if always else Count | None


# Made from the table that reads and echoes the options, so that each of them is declared once.
QueueOptions: Final[Any] = msgspec.defstruct(
    "QueueOptions",
    [_option_sent(option) for option in OPTIONS],
    namespace={"__doc__": "How a queue behaves. An option that is null or absent has its default."},
)
ConfiguredOptions: Final[Any] = msgspec.defstruct(
    "ConfiguredOptions",
    [_option_echoed(option) for option in OPTIONS],
    forbid_unknown_fields=True,
    namespace={"__doc__": "The options in force."},
)
Configuration: Final[Any] = msgspec.defstruct(
    "Configuration",
    [
        ("queue", Name),
        ("namespace", OptionalName | None, None),
        ("task", OptionalName | None, None),
        ("options", QueueOptions, {}),
    ],
    namespace={"__doc__": "A queue and all its options: what is not sent gets its default."},
)
Configured: Final[Any] = msgspec.defstruct(
    "Configured",
    [
        ("configured", bool),
        ("queueId", Uuid),
        ("partitionId", Uuid),
        ("queue", str),
        ("namespace", str),
        ("task", str),
        ("options", ConfiguredOptions),
    ],
    forbid_unknown_fields=True,
    namespace={"__doc__": "The queue as it is now; `partitionId` is that of its `Default` partition."},
)


class Deleted(Answer):
    """`existed` tells whether there was such a queue."""

    deleted: bool
    queue: str
    existed: bool


class Cleared(Answer):
    """How many messages were removed."""

    cleared: bool
    queue: str
    partition: str | None
    messages: Count


class ShortCounters(Answer):
    """Messages of a queue; `pending` leaves out what is being processed."""

    total: Count
    pending: Count
    processing: Count


class QueueInList(Answer):
    """A queue and what it holds."""

    id: Uuid
    name: str
    namespace: str
    task: str
    created_at: Time
    partitions: Count
    messages: ShortCounters


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
    """A queue with all its partitions, by name."""

    id: Uuid
    name: str
    namespace: str
    task: str
    created_at: Time
    partitions: list[PartitionView]
    totals: Counters


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
    """Numbers are always read live, so this only tells of how many things they are."""

    partition: PartitionsUpdated
    queue: QueuesUpdated
    namespace: NamespacesUpdated
    task: TasksUpdated
    system: SystemUpdated
    cleanup: dict[str, Any]


_FILTER: Final = (
    Parameter("namespace", "Only queues of this namespace.", Name),
    Parameter("task", "Only queues of this task.", Name),
)

OPERATIONS: Final[Mapping[str, Operation]] = {
    "POST /api/v1/configure": Operation(
        id="configure",
        summary="Make a queue, or replace its options",
        description="Messages and consumers of a queue that exists are left alone.",
        tag=_TAG,
        body=Configuration,
        body_example={"queue": "orders", "options": {"leaseTime": 60, "retryLimit": 5}},
        answers={200: Configured},
        errors=DATABASE,
    ),
    "DELETE /api/v1/resources/queues/{queue}": Operation(
        id="deleteQueue",
        summary="Delete a queue with all that is in it",
        description="Deleting a queue that does not exist is no failure.",
        tag=_TAG,
        answers={200: Deleted},
        example={"deleted": True, "queue": "orders", "existed": True},
        errors=DATABASE,
    ),
    "DELETE /api/v1/queues/{queue}/clear": Operation(
        id="clearQueue",
        summary="Remove all messages of a queue, or of one partition",
        tag=_TAG,
        parameters=(Parameter("partition", "Only this partition.", Name),),
        answers={200: Cleared},
        example={"cleared": True, "queue": "orders", "partition": None, "messages": 17},
        errors=FOUND,
    ),
    "GET /api/v1/resources/queues": Operation(
        id="queues",
        summary="List queues",
        tag=_TAG,
        parameters=(*_FILTER, *paging(1000)),
        answers={200: QueueList},
        errors=DATABASE,
    ),
    "GET /api/v1/resources/queues/{queue}": Operation(
        id="queue",
        summary="One queue and its partitions",
        tag=_TAG,
        answers={200: QueueView},
        errors=FOUND,
    ),
    "GET /api/v1/resources/partitions": Operation(
        id="partitions",
        summary="List partitions",
        tag=_TAG,
        parameters=(Parameter("queue", "Only partitions of this queue.", Name), *paging(1000)),
        answers={200: PartitionList},
        errors=FOUND,
    ),
    "GET /api/v1/resources/namespaces": Operation(
        id="namespaces", summary="List namespaces", tag=_TAG, answers={200: NamespaceList}, errors=DATABASE
    ),
    "GET /api/v1/resources/tasks": Operation(
        id="tasks", summary="List tasks", tag=_TAG, answers={200: TaskList}, errors=DATABASE
    ),
    "GET /api/v1/resources/overview": Operation(
        id="overview", summary="Everything at once", tag=_TAG, answers={200: Overview}, errors=DATABASE
    ),
    "POST /api/v1/stats/refresh": Operation(
        id="refreshStats", summary="Count everything", tag=_TAG, answers={200: Refreshed}, errors=DATABASE
    ),
}
