"""The status of the server, and of queues."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from queen.broker.inspect.browse import MessageFilter
from queen.errors import BadRequest
from queen.http.api.resources.queues import queue_listing, queue_order
from queen.http.auth import names
from queen.http.routing.call import Call
from queen.http.routing.context import Shard
from queen.http.routing.placement import Everywhere, Paged, by_queue, summed
from queen.http.routing.route import DATABASE, FOUND, RouteTable
from queen.http.server.message import Access
from queen.monitoring.history import TimeRange
from queen.monitoring.status import QueueFilter
from queen.wire.api.monitoring.status import (
    ListedQueues,
    QueueMessage,
    QueueMessagesQuery,
    QueuesSpan,
    QueueStatus,
    QueueStatusQuery,
    StatusQuery,
    StatusQueuesQuery,
    StatusView,
    StoredByTime,
    StoredPoint,
    StoredQuery,
    TopError,
)
from queen.wire.api.resources.queues import Overview, Spread
from queen.wire.fields import Pagination, TimeSpan
from queen.wire.times import iso_millis

routes = RouteTable("Status")

_QUEUE: Final = "/api/v1/status/queues/{queue}"
_INTERVALS: Final = {"minute": 60, "hour": 3600, "day": 86_400}
_MOST_POINTS: Final = 10_000
_TOP_ERRORS: Final = 10
_EVER: Final = datetime.min.replace(tzinfo=UTC)
_STORED: Final = ("total", "pending", "processing", "completed", "dead_letter")


def time_range(query: TimeSpan, hours: int) -> TimeRange:
    """From `from` to `to`; without them, the last hours. Raises `BadRequest` when they exclude each other."""
    until = query.until or datetime.now(UTC)
    since = query.since
    if since is None:
        try:
            since = until - timedelta(hours=hours)
        except OverflowError:
            since = datetime.min.replace(tzinfo=UTC)
    if since >= until:
        raise BadRequest(f"from ({since.isoformat()}) must be before to ({until.isoformat()})")
    return TimeRange(since, until)


def _merge_overviews(answers: Sequence[Overview]) -> Overview:
    """Counts are added; time lag and throughput are those of shard 0, which counts for all."""
    first = answers[0]
    offsets = [answer.lag.offset for answer in answers]
    behind = [one for one in offsets if one.max] or offsets[:1]
    offset = Spread(
        round(sum(one.avg for one in behind) / len(behind), 3),
        round(sum(one.median for one in behind) / len(behind), 3),
        min(one.min for one in behind),
        max(one.max for one in behind),
    )
    return msgspec.structs.replace(
        first,
        queues=sum(answer.queues for answer in answers),
        partitions=sum(answer.partitions for answer in answers),
        # Shards may have the same ones: there are at least as many as on the shard that has the most.
        namespaces=max(answer.namespaces for answer in answers),
        tasks=max(answer.tasks for answer in answers),
        messages=msgspec.structs.replace(
            first.messages, **{key: sum(getattr(answer.messages, key) for answer in answers) for key in _STORED}
        ),
        lag=msgspec.structs.replace(first.lag, offset=offset),
    )


def _merge_statuses(answers: Sequence[StatusView]) -> StatusView:
    """Queues, leases and dead letters are added; the series are those of shard 0."""
    first = answers[0]
    errors: dict[str, int] = {}
    for answer in answers:
        for one in answer.dead_letter_queue.top_errors:
            errors[one.error] = errors.get(one.error, 0) + one.count
    letters = summed([answer.dead_letter_queue for answer in answers])
    letters.top_errors = [
        TopError(error, count) for error, count in sorted(errors.items(), key=lambda one: -one[1])[:_TOP_ERRORS]
    ]
    return msgspec.structs.replace(
        first,
        queues=[queue for answer in answers for queue in answer.queues],
        messages=msgspec.structs.replace(
            first.messages, **{key: sum(getattr(answer.messages, key) for answer in answers) for key in _STORED}
        ),
        leases=summed([answer.leases for answer in answers]),
        dead_letter_queue=letters,
    )


def _merge_stored(answers: Sequence[StoredByTime]) -> StoredByTime:
    """The intervals are the same on every shard."""
    points = zip(*(answer.data_points for answer in answers), strict=False)
    merged = [StoredPoint(point[0].timestamp, sum(one.messages for one in point)) for point in points]
    return msgspec.structs.replace(answers[0], data_points=merged)


@routes.on_shard(
    "GET",
    "/api/v1/resources/overview",
    access=Access.READ_ONLY,
    of_groups=False,
    placement=Everywhere(_merge_overviews),
    tag="Queues",
    summary="Counts, lag and throughput of the whole server",
    returns={200: Overview},
    errors=DATABASE,
    cached=True,
)
async def overview(shard: Shard, call: Call[None, None]) -> Overview:
    return await shard.status.overview()


@routes.on_shard(
    "GET",
    "/api/v1/status",
    access=Access.READ_ONLY,
    placement=Everywhere(_merge_statuses, by_queue=True),
    summary="Status of the server and its queues",
    description="Counts are current and exact; throughput is of the last hour, or from `from` to `to`.",
    query=StatusQuery,
    returns={200: StatusView},
    errors=DATABASE,
    cached=True,
)
async def status(shard: Shard, call: Call[StatusQuery, None]) -> StatusView:
    query = call.query
    times = time_range(query, hours=1)
    return await shard.status.status(times, _wanted(query), with_queues=query.include_queues)


@routes.on_shard(
    "GET",
    "/api/v1/status/queues",
    access=Access.READ_ONLY,
    names=names.by_query("namespace"),
    placement=Paged("queues", lambda queue: queue.created_at, order=queue_order),
    summary="List queues with their message counts",
    query=StatusQueuesQuery,
    returns={200: ListedQueues},
    errors=DATABASE,
    cached=True,
)
async def status_queues(shard: Shard, call: Call[StatusQueuesQuery, None]) -> ListedQueues:
    query, wanted, resources = call.query, queue_listing(call.query), shard.resources
    listed = await resources.queues(wanted, query.limit, query.offset, with_processing=True)
    total = await resources.queue_count(wanted)
    return ListedQueues(listed, Pagination(query.limit, query.offset, total))


@routes.on_shard(
    "GET",
    _QUEUE,
    access=Access.READ_ONLY,
    placement=by_queue(),
    summary="Status of one queue",
    query=QueueStatusQuery,
    returns={200: QueueStatus},
    errors=FOUND,
    cached=True,
)
async def status_queue(shard: Shard, call: Call[QueueStatusQuery, None]) -> QueueStatus:
    query = call.query
    limit = query.limit if query.include_partitions else 0
    return await shard.resources.queue_status(call.name("queue"), limit, query.offset, query.after)


@routes.on_shard(
    "GET",
    f"{_QUEUE}/messages",
    access=Access.READ_ONLY,
    placement=by_queue(),
    summary="List the messages of a queue, newest first",
    query=QueueMessagesQuery,
    returns={200: list[QueueMessage]},
    errors=FOUND,
    cached=True,
)
async def status_queue_messages(shard: Shard, call: Call[QueueMessagesQuery, None]) -> list[QueueMessage]:
    name = call.name("queue")
    await shard.resources.check_exists(name)
    wanted = MessageFilter(queue=name, since=_EVER)
    page = await shard.broker.message_browser.page(wanted, call.query.limit, call.query.offset)
    return [
        QueueMessage(*(getattr(message, field) for field in QueueMessage.__struct_fields__))
        for message in page.messages
    ]


@routes.on_shard(
    "GET",
    "/api/v1/status/analytics",
    access=Access.READ_ONLY,
    placement=Everywhere(_merge_stored, by_queue=True),
    summary="Arrival times of the messages that are still stored",
    description="Of the last day, unless `from` and `to` are sent.",
    query=StoredQuery,
    returns={200: StoredByTime},
    errors=DATABASE,
    cached=True,
)
async def status_analytics(shard: Shard, call: Call[StoredQuery, None]) -> StoredByTime:
    interval = call.query.interval
    seconds = _INTERVALS[interval]
    times = time_range(call.query, hours=24)
    points = (times.until - times.since).total_seconds() / seconds
    if points > _MOST_POINTS:
        raise BadRequest(
            f"from and to are {points:.0f} times interval={interval} apart, more than {_MOST_POINTS}:"
            " ask for a shorter time or a longer interval"
        )
    stored = await shard.status.stored_by_time(times, seconds, _wanted(call.query))
    return StoredByTime(stored, interval, iso_millis(times.since), iso_millis(times.until))


def _wanted(query: QueuesSpan) -> QueueFilter:
    return QueueFilter(query.queue, query.namespace, query.task)
