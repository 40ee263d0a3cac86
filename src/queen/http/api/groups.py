"""Consumer groups: positions, seeking, subscriptions, deleting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from queen.errors import BadRequest
from queen.http.routing.call import Call
from queen.http.routing.context import Shard
from queen.http.routing.placement import Everywhere, Paged, by_queue, summed
from queen.http.routing.query import read_time
from queen.http.routing.route import DATABASE, FOUND, RouteTable
from queen.http.server.message import Access
from queen.wire.api.groups import (
    DeleteGroupQuery,
    GroupDeleted,
    GroupOnQueue,
    GroupPaused,
    GroupSummary,
    LaggingPartition,
    LaggingQuery,
    PartitionSought,
    Seek,
    Sought,
    Subscription,
    SubscriptionMoved,
    decode_subscription,
)
from queen.wire.times import iso_millis

routes = RouteTable("Consumer groups")

_GROUP = "/api/v1/consumer-groups/{group}"
_QUEUE = f"{_GROUP}/queues/{{queue}}"


def _by_name(answers: Sequence[list[GroupSummary]]) -> list[GroupSummary]:
    return sorted((one for answer in answers for one in answer), key=lambda one: (one.name, one.queue_name))


def _by_queue(answers: Sequence[dict[str, GroupOnQueue]]) -> dict[str, Any]:
    return dict(sorted(summed(answers).items()))


@routes.on_shard(
    "GET",
    "/api/v1/consumer-groups",
    access=Access.READ_ONLY,
    placement=Everywhere(_by_name),
    summary="List consumer groups",
    description="One entry for each group and queue. Consumers that name no group are `__QUEUE_MODE__`.",
    returns={200: list[GroupSummary]},
    errors=DATABASE,
    cached=True,
)
async def groups(shard: Shard, call: Call[None, None]) -> list[GroupSummary]:
    return await shard.groups.summaries()


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
    return await shard.groups.lagging(query.min_lag_seconds, query.limit, query.offset)


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
    placement=by_queue(),
    summary="Pause a group on a queue",
    description="Its pops get nothing and wait, those of other groups are served. What it has leased can be "
    "acknowledged and renewed. The group need not have popped yet.",
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
    placement=by_queue(),
    summary="Seek a group on a queue",
    description="Leases of the group end. One of `toEnd: true` and `timestamp` is required.",
    body=Seek,
    body_example={"timestamp": "2026-04-26T10:59:28Z"},
    returns={200: Sought},
    errors=DATABASE,
)
async def seek(shard: Shard, call: Call[None, Seek]) -> Sought:
    name, queue = call.name("group"), call.name("queue")
    to_end, timestamp = call.body.to_end is True, call.body.timestamp
    if not to_end and timestamp is None:
        raise BadRequest("Must specify either 'toEnd': true or 'timestamp'")
    moment = read_time(timestamp, "timestamp") if timestamp is not None and not to_end else None
    count = await shard.groups.seek(name, queue, moment)
    return Sought(True, name, queue, to_end, None if to_end else timestamp, count)


@routes.on_shard(
    "POST",
    f"{_QUEUE}/partitions/{{partition}}/seek",
    access=Access.READ_WRITE,
    placement=by_queue(),
    summary="Seek a group to the end of one partition",
    returns={200: PartitionSought},
    errors=FOUND,
)
async def seek_partition(shard: Shard, call: Call[None, None]) -> PartitionSought:
    name, queue, partition = (call.name(key) for key in ("group", "queue", "partition"))
    result = await shard.groups.seek_partition(name, queue, partition)
    return PartitionSought(True, name, queue, partition, result.updated, iso_millis(result.moved_to))
