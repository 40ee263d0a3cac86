"""Queues: configure, delete, clear, list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import UNSET

from queen.broker.inspect.resources import QueueListing
from queen.broker.queues import option_values
from queen.errors import BadRequest, NotFound
from queen.http.auth import names
from queen.http.routing.call import Call
from queen.http.routing.context import Shard
from queen.http.routing.placement import Everywhere, Paged, by_queue, labelled, summed
from queen.http.routing.route import DATABASE, FOUND, RouteTable
from queen.http.server.message import Access
from queen.wire.api.monitoring.status import StatusQueuesQuery
from queen.wire.api.resources.queues import (
    Cleared,
    ClearQuery,
    Configuration,
    Configured,
    Deleted,
    DepthQuery,
    NamespaceList,
    NamespacesUpdated,
    PartitionDepth,
    PartitionInList,
    PartitionList,
    PartitionsQuery,
    PartitionsUpdated,
    Paused,
    QueueDepth,
    QueueInList,
    QueueList,
    QueuePartitionsQuery,
    QueuesQuery,
    QueuesUpdated,
    QueueView,
    Refreshed,
    SystemUpdated,
    TaskList,
    TasksUpdated,
    decode_configuration,
)
from queen.wire.fields import Pagination

routes = RouteTable("Queues")

_QUEUE_KEYS: Final[Mapping[str, Callable[[QueueInList], Any]]] = {
    "created": lambda queue: queue.created_at,
    "name": lambda queue: queue.name,
    "partitions": lambda queue: queue.partitions,
    "stored": lambda queue: queue.messages.total,
    "pending": lambda queue: queue.messages.pending,
    "density": lambda queue: queue.messages.total / max(1, queue.partitions),
    "lag": lambda queue: -1 if queue.max_time_lag is UNSET else queue.max_time_lag,
}


def descends(query: Any) -> bool:
    """Whether a list is sorted from the largest on: names are not, unless that is asked for."""
    return bool(query.order == "desc" if query.order is not None else query.sort not in ("name", "queue"))


def queue_order(query: QueuesQuery | StatusQueuesQuery) -> tuple[Callable[[QueueInList], Any], bool]:
    """The key by which queues of several shards are merged, and whether it descends."""
    return _QUEUE_KEYS[query.sort], descends(query)


def queue_listing(query: QueuesQuery | StatusQueuesQuery) -> QueueListing:
    """Which queues a request is for."""
    return QueueListing(query.namespace, query.task, query.search, query.sort, descends(query))


def _partition_order(query: PartitionsQuery) -> tuple[Callable[[PartitionInList], Any], bool]:
    return lambda one: (one.queue, one.name), descends(query)


@routes.on_shard(
    "POST",
    "/api/v1/configure",
    access=Access.READ_WRITE,
    names=names.configured,
    of_groups=False,
    audited=True,
    placement=by_queue(),
    summary="Create a queue, or replace its options",
    description="Messages and consumers of an existing queue are not affected.",
    body=Configuration,
    decode=decode_configuration,
    body_example={"queue": "orders", "options": {"leaseTime": 60, "retryLimit": 5}},
    returns={200: Configured},
    errors=DATABASE,
)
async def configure(shard: Shard, call: Call[None, Configuration]) -> Configured:
    sent = call.body
    return await shard.queues.configure(sent.queue, sent.namespace or "", sent.task or "", option_values(sent.options))


@routes.on_shard(
    "DELETE",
    "/api/v1/resources/queues/{queue}",
    access=Access.ADMIN,
    placement=by_queue(),
    summary="Delete a queue and everything in it",
    description="Deleting a queue that does not exist is not an error.",
    returns={200: Deleted},
    example={"deleted": True, "queue": "orders", "existed": True},
    errors=DATABASE,
)
async def delete_queue(shard: Shard, call: Call[None, None]) -> Deleted:
    name = call.name("queue")
    return Deleted(True, name, await shard.queues.delete(name))


@routes.on_shard(
    "DELETE",
    "/api/v1/queues/{queue}/clear",
    access=Access.ADMIN,
    placement=by_queue(),
    summary="Remove all messages of a queue, or of one partition",
    query=ClearQuery,
    returns={200: Cleared},
    example={"cleared": True, "queue": "orders", "partition": None, "messages": 17},
    errors=FOUND,
)
async def clear_queue(shard: Shard, call: Call[ClearQuery, None]) -> Cleared:
    name, partition = call.name("queue"), call.query.partition or None
    return Cleared(True, name, partition, await shard.queues.clear(name, partition))


@routes.on_shard(
    "POST",
    "/api/v1/resources/queues/{queue}/pause",
    access=Access.READ_WRITE,
    audited=True,
    placement=by_queue(),
    summary="Pause a queue",
    description="Pushes are stored as before; pops get nothing, and wait as they do for an empty queue. What was "
    "leased before can be acknowledged and renewed.",
    returns={200: Paused},
    example={"success": True, "queue": "orders", "paused": True, "changed": True},
    errors=FOUND,
)
async def pause_queue(shard: Shard, call: Call[None, None]) -> Paused:
    name = call.name("queue")
    return Paused(True, name, True, await shard.queues.pause(name, True))


@routes.on_shard(
    "POST",
    "/api/v1/resources/queues/{queue}/resume",
    access=Access.READ_WRITE,
    audited=True,
    placement=by_queue(),
    summary="Resume a queue",
    description="Waiting pops are served at once. Groups that are paused on it stay so.",
    returns={200: Paused},
    example={"success": True, "queue": "orders", "paused": False, "changed": True},
    errors=FOUND,
)
async def resume_queue(shard: Shard, call: Call[None, None]) -> Paused:
    name = call.name("queue")
    return Paused(True, name, False, await shard.queues.pause(name, False))


@routes.on_shard(
    "GET",
    "/api/v1/resources/queues",
    access=Access.READ_ONLY,
    names=names.by_query("namespace"),
    of_groups=False,
    placement=Paged("queues", lambda queue: queue.created_at, order=queue_order),
    summary="List queues",
    query=QueuesQuery,
    returns={200: QueueList},
    errors=DATABASE,
    cached=True,
)
async def queues(shard: Shard, call: Call[QueuesQuery, None]) -> QueueList:
    query, wanted, resources = call.query, queue_listing(call.query), shard.resources
    if query.limit is None and query.offset is None:
        return QueueList(await resources.queues(wanted))
    limit, offset = query.limit or 1000, query.offset or 0
    listed = await resources.queues(wanted, limit, offset)
    return QueueList(listed, await resources.queue_count(wanted), Pagination(limit, offset))


@routes.on_shard(
    "GET",
    "/api/v1/resources/queues/{queue}",
    access=Access.READ_ONLY,
    of_groups=False,
    placement=by_queue(),
    summary="A queue and its partitions",
    query=QueuePartitionsQuery,
    returns={200: QueueView},
    errors=FOUND,
)
async def queue(shard: Shard, call: Call[QueuePartitionsQuery, None]) -> QueueView:
    return await shard.resources.queue(call.name("queue"), call.query.limit, call.query.after)


@routes.on_shard(
    "GET",
    "/api/v1/resources/queues/{queue}/depth",
    access=Access.READ_ONLY,
    names=names.by_query("group"),
    placement=by_queue(),
    summary="The number of messages in a queue, and the lag of each group",
    query=DepthQuery,
    returns={200: QueueDepth},
    example={
        "queue": "orders",
        "depth": 17,
        "groups": {"billing": 3},
        "group": None,
        "pending": 3,
        "partitionsPending": 1,
        "conflation": False,
        "effectivePending": 3,
        "partitions": [{"partition": "customer-7", "pending": 3}],
    },
    errors=FOUND,
)
async def queue_depth(shard: Shard, call: Call[DepthQuery, None]) -> QueueDepth:
    name, group = call.name("queue"), call.query.group or None
    rows = await shard.broker.database.fetch("queue_depth", name)
    if not rows:
        raise NotFound("Queue not found")
    total, *groups = rows
    backlog = await shard.broker.database.fetch("queue_backlog", name, group)
    pending = backlog[0]["pending_in_all"] if backlog else 0
    partitions = backlog[0]["partitions"] if backlog else 0
    conflation = bool(group) and (await shard.broker.database.fetch("queue_conflation", name, group))[0]["conflation"]
    return QueueDepth(
        name,
        total["depth"],
        {row["group_name"]: row["depth"] for row in groups if group in (None, row["group_name"])},
        group,
        pending,
        partitions,
        conflation,
        partitions if conflation else pending,
        [PartitionDepth(row["partition"], row["pending"]) for row in backlog],
    )


@routes.on_shard(
    "GET",
    "/api/v1/resources/partitions",
    access=Access.READ_ONLY,
    names=names.by_query("queue"),
    of_groups=False,
    placement=Paged("partitions", lambda one: (one.queue, one.name), order=_partition_order),
    summary="List partitions",
    query=PartitionsQuery,
    returns={200: PartitionList},
    errors=FOUND,
)
async def partitions(shard: Shard, call: Call[PartitionsQuery, None]) -> PartitionList:
    query, limit, offset = call.query, call.query.limit, call.query.offset
    if query.sort != "name" and not query.queue:
        raise BadRequest("sort must be name where no queue is named")
    listed, total = await shard.resources.partitions(
        query.queue, query.search, query.sort, descends(query), limit, offset
    )
    return PartitionList(listed, total, Pagination(limit, offset))


@routes.on_shard(
    "GET",
    "/api/v1/resources/namespaces",
    access=Access.READ_ONLY,
    of_groups=False,
    placement=Everywhere(labelled("namespaces", "namespace")),
    summary="List namespaces",
    returns={200: NamespaceList},
    errors=DATABASE,
    cached=True,
)
async def namespaces(shard: Shard, call: Call[None, None]) -> NamespaceList:
    return NamespaceList(await shard.resources.namespaces())


@routes.on_shard(
    "GET",
    "/api/v1/resources/tasks",
    access=Access.READ_ONLY,
    of_groups=False,
    placement=Everywhere(labelled("tasks", "task")),
    summary="List tasks",
    returns={200: TaskList},
    errors=DATABASE,
    cached=True,
)
async def tasks(shard: Shard, call: Call[None, None]) -> TaskList:
    return TaskList(await shard.resources.tasks())


@routes.on_shard(
    "POST",
    "/api/v1/stats/refresh",
    access=Access.ADMIN,
    placement=Everywhere(summed),
    id="refreshStats",
    summary="Count queues, partitions, namespaces and tasks",
    description="Statistics are read live, so there is nothing to refresh.",
    returns={200: Refreshed},
    errors=DATABASE,
)
async def refresh(shard: Shard, call: Call[None, None]) -> Refreshed:
    counts = await shard.resources.counts()
    return Refreshed(
        PartitionsUpdated(counts["partitions"]),
        QueuesUpdated(counts["queues"]),
        NamespacesUpdated(counts["namespaces"]),
        TasksUpdated(counts["tasks"]),
        SystemUpdated(1),
        {},
    )
