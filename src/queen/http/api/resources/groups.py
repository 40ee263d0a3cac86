"""Consumer groups: positions, seeking, subscriptions, deleting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from queen.broker.ack.leases import HeldLease
from queen.broker.inspect.groups import MOST_COUNTED, MOST_FURTHEST
from queen.broker.inspect.seeks import BEGINNING, END, Place
from queen.errors import BadRequest, Conflict, NotFound
from queen.http.api.resources.queues import descends
from queen.http.routing.call import Call
from queen.http.routing.context import Shard
from queen.http.routing.placement import Custom, Everywhere, Invoke, Paged, by_queue, summed
from queen.http.routing.query import read_time
from queen.http.routing.route import DATABASE, FOUND, RouteTable
from queen.http.server.message import Access
from queen.wire.api.resources.groups import (
    DeleteGroupQuery,
    GroupDeleted,
    GroupOnQueue,
    GroupPage,
    GroupPartitions,
    GroupPartitionsQuery,
    GroupPaused,
    GroupsQuery,
    GroupSummary,
    KeptSeeks,
    LaggingPartition,
    LaggingQuery,
    LeaseReleased,
    PartitionSought,
    Release,
    Seek,
    SeekPreview,
    SeekPreviewQuery,
    SeekUndo,
    SeekUndone,
    Sought,
    Subscription,
    SubscriptionMoved,
    decode_subscription,
)
from queen.wire.fields import Pagination
from queen.wire.times import iso_millis

if TYPE_CHECKING:
    from queen.broker.sharding.shard_router import ShardRouter

routes = RouteTable("Consumer groups")

_GROUP = "/api/v1/consumer-groups/{group}"
_QUEUE = f"{_GROUP}/queues/{{queue}}"
_PARTITION = f"{_QUEUE}/partitions/{{partition}}"


def _by_name(answers: Sequence[list[GroupSummary]]) -> list[GroupSummary]:
    return sorted((one for answer in answers for one in answer), key=lambda one: (one.name, one.queue_name))


def _by_queue(answers: Sequence[dict[str, GroupOnQueue]]) -> dict[str, Any]:
    return dict(sorted(summed(answers).items()))


_SORT_KEYS: Final[Mapping[str, Callable[[GroupSummary], Any]]] = {
    "name": lambda one: (one.name, one.queue_name),
    "queue": lambda one: (one.queue_name, one.name),
    "lag": lambda one: one.total_lag,
    "time": lambda one: one.max_time_lag,
}


def _chosen(listed: Sequence[GroupSummary], query: GroupsQuery) -> list[GroupSummary] | GroupPage:
    """The groups that a query selects; they are sorted by name."""
    text = query.search.lower()
    found = [
        one
        for one in listed
        if query.group in ("", one.name)
        and query.queue in ("", one.queue_name)
        and query.namespace in ("", one.namespace)
        and query.task in ("", one.task)
        and (text in one.name.lower() or text in one.queue_name.lower())
        and (one.total_lag or not query.lagging)
    ]
    found.sort(key=_SORT_KEYS[query.sort], reverse=descends(query))
    if query.limit is None and query.offset is None:
        return found
    limit, offset = query.limit or 1000, query.offset or 0
    names = {one.name for one in found}
    return GroupPage(found[offset : offset + limit], len(found), len(names), Pagination(limit, offset))


async def _place_groups(
    shards: ShardRouter, invoke: Invoke, call: Call[GroupsQuery, None]
) -> list[GroupSummary] | GroupPage:
    answers = await shards.on_available_shards(
        lambda shard: invoke(shard, call.with_query(limit=None, offset=None, sort="name", order=None))
    )
    return _chosen(_by_name(answers), call.query)


@routes.on_shard(
    "GET",
    "/api/v1/consumer-groups",
    access=Access.READ_ONLY,
    placement=Custom(_place_groups),
    summary="List consumer groups",
    description="One entry for each group and queue. Consumers that name no group are `__QUEUE_MODE__`. With `limit` "
    "or `offset` a page of them, else a bare list.",
    query=GroupsQuery,
    returns={200: list[GroupSummary] | GroupPage},
    errors=DATABASE,
    cached=True,
)
async def groups(shard: Shard, call: Call[GroupsQuery, None]) -> list[GroupSummary] | GroupPage:
    return _chosen(await shard.group_summaries(), call.query)


@routes.on_shard(
    "GET",
    "/api/v1/consumer-groups/lagging",
    access=Access.READ_ONLY,
    placement=Paged("", lambda one: one.time_lag_seconds),
    summary="List partitions on which a group lags",
    description="The largest lag first.",
    query=LaggingQuery,
    returns={200: list[LaggingPartition]},
    errors=DATABASE,
    cached=True,
)
async def lagging_partitions(shard: Shard, call: Call[LaggingQuery, None]) -> list[LaggingPartition]:
    query = call.query
    end = query.offset + query.limit
    if end > MOST_FURTHEST:
        return await shard.groups.lagging(query.min_lag_seconds, query.limit, query.offset)
    found = [one for one in await shard.furthest() if one.time_lag_seconds >= query.min_lag_seconds]
    return found[query.offset : end]


@routes.on_shard(
    "GET",
    _GROUP,
    access=Access.READ_ONLY,
    placement=Everywhere(_by_queue),
    summary="The positions of a group, by queue",
    description="Empty for an unknown group.",
    returns={200: dict[str, GroupOnQueue]},
    errors=DATABASE,
)
async def group(shard: Shard, call: Call[None, None]) -> dict[str, GroupOnQueue]:
    return await shard.groups.detail(call.name("group"))


@routes.on_shard(
    "GET",
    f"{_QUEUE}/partitions",
    access=Access.READ_ONLY,
    placement=by_queue(),
    id="listGroupPartitions",
    summary="The positions of a group on a queue, page by page",
    query=GroupPartitionsQuery,
    returns={200: GroupPartitions},
    errors=FOUND,
    cached=True,
)
async def group_partitions(shard: Shard, call: Call[GroupPartitionsQuery, None]) -> GroupPartitions:
    name, queue, query = call.name("group"), call.name("queue"), call.query
    listed, total = await shard.groups.partitions(
        name, queue, query.search, query.sort, descends(query), query.limit, query.offset
    )
    if total >= MOST_COUNTED and not query.search:
        found = [one.members for one in await shard.group_summaries() if (one.name, one.queue_name) == (name, queue)]
        total = max([total, *found])
    return GroupPartitions(listed, total, Pagination(query.limit, query.offset))


@routes.on_shard(
    "DELETE",
    _GROUP,
    access=Access.ADMIN,
    placement=Everywhere(summed, required=True),
    summary="Delete a group on all queues",
    query=DeleteGroupQuery,
    returns={200: GroupDeleted},
    errors=DATABASE,
)
async def delete_group(shard: Shard, call: Call[DeleteGroupQuery, None]) -> GroupDeleted:
    name, with_subscriptions = call.name("group"), call.query.delete_metadata
    count = await shard.groups.delete(name, None, with_subscriptions=with_subscriptions)
    return GroupDeleted(True, name, count, with_subscriptions)


@routes.on_shard(
    "DELETE",
    _QUEUE,
    access=Access.ADMIN,
    placement=by_queue(),
    summary="Delete a group on one queue",
    query=DeleteGroupQuery,
    returns={200: GroupDeleted},
    errors=DATABASE,
)
async def delete_group_for_queue(shard: Shard, call: Call[DeleteGroupQuery, None]) -> GroupDeleted:
    name, queue, with_subscriptions = call.name("group"), call.name("queue"), call.query.delete_metadata
    count = await shard.groups.delete(name, queue, with_subscriptions=with_subscriptions)
    return GroupDeleted(True, name, count, with_subscriptions, queue)


@routes.on_shard(
    "POST",
    f"{_GROUP}/subscription",
    access=Access.READ_WRITE,
    audited=True,
    placement=Everywhere(summed, required=True),
    summary="Change the start position of a group",
    description="Only on partitions that it has not consumed from.",
    body=Subscription,
    decode=decode_subscription,
    body_example={"subscriptionTimestamp": "2026-04-26T10:59:28Z"},
    returns={200: SubscriptionMoved},
    errors=DATABASE,
)
async def move_subscription(shard: Shard, call: Call[None, Subscription]) -> SubscriptionMoved:
    name, timestamp = call.name("group"), call.body.subscription_timestamp
    since = read_time(timestamp, "subscriptionTimestamp")
    return SubscriptionMoved(True, name, timestamp, await shard.groups.move_subscriptions(name, since))


@routes.on_shard(
    "POST",
    f"{_QUEUE}/pause",
    access=Access.READ_WRITE,
    audited=True,
    placement=by_queue(),
    summary="Pause a group on a queue",
    description="Its pops get nothing and wait, those of other groups are served. What it has leased can be "
    "acknowledged and renewed.",
    returns={200: GroupPaused},
    errors=FOUND,
)
async def pause_group(shard: Shard, call: Call[None, None]) -> GroupPaused:
    name, queue = call.name("group"), call.name("queue")
    return GroupPaused(True, name, queue, True, await shard.queues.pause_group(queue, name, True))


@routes.on_shard(
    "POST",
    f"{_QUEUE}/resume",
    access=Access.READ_WRITE,
    audited=True,
    placement=by_queue(),
    summary="Resume a group on a queue",
    description="Its waiting pops are served at once, unless the queue is paused.",
    returns={200: GroupPaused},
    errors=FOUND,
)
async def resume_group(shard: Shard, call: Call[None, None]) -> GroupPaused:
    name, queue = call.name("group"), call.name("queue")
    return GroupPaused(True, name, queue, False, await shard.queues.pause_group(queue, name, False))


@routes.on_shard(
    "POST",
    f"{_QUEUE}/seek",
    access=Access.READ_WRITE,
    audited=True,
    placement=by_queue(),
    summary="Seek a group on a queue",
    description="Leases of the group end. One of `toEnd`, `toBeginning`, `timestamp` and `offset` is required. With "
    "`limit` a part of the partitions, each part a transaction of its own. Where the group was is kept for a day.",
    body=Seek,
    body_example={"timestamp": "2026-04-26T10:59:28Z"},
    returns={200: Sought},
    errors=DATABASE,
)
async def seek(shard: Shard, call: Call[None, Seek]) -> Sought:
    name, queue, asked = call.name("group"), call.name("queue"), call.body
    place = _place_in(asked)
    moved = await shard.seeks.seek(name, queue, place, asked.limit, asked.cursor)
    timestamp = asked.timestamp if isinstance(place, datetime) else None
    return Sought(True, name, queue, place == END, timestamp, moved.partitions, moved.seek, moved.cursor)


@routes.on_shard(
    "POST",
    f"{_QUEUE}/seek/undo",
    access=Access.READ_WRITE,
    audited=True,
    placement=by_queue(),
    id="undoSeek",
    summary="Undo a seek",
    description="The group goes on where it was before, on the partitions that the seek has moved; what it has "
    "consumed since comes again, or is skipped. With `limit` a part of them at a time.",
    body=SeekUndo,
    body_example={"seekId": 17},
    returns={200: SeekUndone},
    errors=(404, 409, 503),
)
async def undo_seek(shard: Shard, call: Call[None, SeekUndo]) -> SeekUndone:
    name, queue, asked = call.name("group"), call.name("queue"), call.body
    moved = await shard.seeks.undo(name, queue, asked.seek_id, asked.limit, asked.cursor)
    return SeekUndone(True, name, queue, moved.partitions, moved.seek, moved.cursor)


@routes.on_shard(
    "GET",
    f"{_QUEUE}/seeks",
    access=Access.READ_ONLY,
    placement=by_queue(),
    summary="Seeks of the last day",
    description="The newest first; those that can be undone have `undoneBy` null.",
    returns={200: KeptSeeks},
    errors=FOUND,
)
async def list_seeks(shard: Shard, call: Call[None, None]) -> KeptSeeks:
    return KeptSeeks(await shard.seeks.kept(call.name("group"), call.name("queue")))


@routes.on_shard(
    "GET",
    f"{_QUEUE}/seek/preview",
    access=Access.READ_ONLY,
    placement=by_queue(),
    id="previewSeek",
    summary="What a seek would do",
    description="How many messages would come again, and how many would be skipped. Nothing is changed. Messages that "
    "were deleted one by one count as well. With `within`, an estimate where there are too many partitions to count.",
    query=SeekPreviewQuery,
    returns={200: SeekPreview},
    errors=FOUND,
)
async def preview_seek(shard: Shard, call: Call[SeekPreviewQuery, None]) -> SeekPreview:
    name, queue, asked = call.name("group"), call.name("queue"), call.query
    place = _place(asked.to_end, asked.to_beginning, asked.timestamp, asked.offset)
    within = None if asked.within is None else asked.within / 1000
    return await shard.seeks.preview(name, queue, asked.partition or None, place, asked.limit, within)


@routes.on_shard(
    "POST",
    f"{_PARTITION}/seek",
    access=Access.READ_WRITE,
    audited=True,
    placement=by_queue(),
    summary="Seek a group on one partition",
    description="As on a queue; without a body, to the end.",
    body=Seek,
    body_required=False,
    body_example={"offset": 1200},
    returns={200: PartitionSought},
    errors=FOUND,
)
async def seek_partition(shard: Shard, call: Call[None, Seek]) -> PartitionSought:
    name, queue, partition = (call.name(key) for key in ("group", "queue", "partition"))
    if call.body and (call.body.limit is not None or call.body.cursor):
        raise BadRequest("'limit' and 'cursor' are for a seek on all partitions of a queue")
    place = END if not call.body or call.body == Seek() else _place_in(call.body)
    result = await shard.seeks.seek_partition(name, queue, partition, place)
    moved_to = iso_millis(result.moved_to)
    return PartitionSought(True, name, queue, partition, result.updated, moved_to, result.offset, result.seek)


@routes.on_shard(
    "POST",
    f"{_PARTITION}/release",
    access=Access.READ_WRITE,
    audited=True,
    placement=by_queue(),
    summary="Release the lease of a group on a partition",
    description="Its messages can be popped again at once; no retry is counted. The consumer that holds them is not "
    "notified, and what it acknowledges with this lease from now on is refused.",
    body=Release,
    body_required=False,
    returns={200: LeaseReleased},
    errors=(404, 409, 503),
)
async def release_lease(shard: Shard, call: Call[None, Release]) -> LeaseReleased:
    name, queue, partition = (call.name(key) for key in ("group", "queue", "partition"))
    partition_id, lease_id = await shard.groups.current_lease(name, queue, partition)
    wanted = call.body.lease_id if call.body else None
    if wanted is not None and wanted.lower() != lease_id:
        raise Conflict(f"Partition {partition!r} is leased to the group as {lease_id}, not as {wanted}")
    if not await shard.broker.releaser.release([HeldLease(lease_id, (partition_id,))]):
        raise NotFound(f"The group has no lease on partition {partition!r}")
    preview = await shard.seeks.preview(name, queue, partition, END, 1)
    return LeaseReleased(True, name, queue, partition, lease_id, preview.skipped)


def _place_in(asked: Seek) -> Place:
    # Beside `toEnd` a time means nothing, as it always has.
    at = read_time(asked.timestamp, "timestamp") if asked.timestamp is not None and not asked.to_end else None
    return _place(asked.to_end, asked.to_beginning, at, asked.offset)


def _place(to_end: bool | None, to_beginning: bool | None, moment: datetime | None, offset: int | None) -> Place:
    """The target of a seek, given by exactly one of these."""
    places: list[Place | None] = [END if to_end else None, BEGINNING if to_beginning else None, moment, offset]
    said = [place for place in places if place is not None]
    if not said:
        # Worded as clients know it.
        raise BadRequest("Must specify either 'toEnd': true or 'timestamp'")
    if len(said) > 1:
        raise BadRequest("Must specify only one of 'toEnd', 'toBeginning', 'timestamp' and 'offset'")
    return said[0]
