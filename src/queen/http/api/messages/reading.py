"""Reading logs by offset, which consumes nothing."""

from __future__ import annotations

from queen.http.routing.call import Call
from queen.http.routing.context import Shard
from queen.http.routing.placement import by_queue
from queen.http.routing.route import FOUND, Media, RouteTable
from queen.http.server.message import Access, Response
from queen.wire.api.messages.reading import LogPositions, PositionsQuery, SegmentsQuery
from queen.wire.segment import MEDIA_TYPE

routes = RouteTable("Messages")


@routes.on_shard(
    "GET",
    "/api/v1/read/{queue}",
    access=Access.READ_ONLY,
    placement=by_queue(),
    summary="The first and next offsets of the partitions of a queue",
    description='For reading whole queues by offset, as `format("queen")` of Spark does.',
    query=PositionsQuery,
    returns={200: LogPositions},
    errors=FOUND,
)
async def log_positions(shard: Shard, call: Call[PositionsQuery, None]) -> LogPositions:
    return await shard.log_reader.positions(call.name("queue"), call.query.at)


@routes.on_shard(
    "GET",
    "/api/v1/read/{queue}/partition/{partition}",
    access=Access.READ_ONLY,
    placement=by_queue(),
    summary="Segments of a partition by offset",
    description="Consumes nothing. The answer is binary: segments with many messages each, as many as fit in some "
    "megabytes and at least one. Ask again from the end of the last one; an empty answer means that there are no more.",
    query=SegmentsQuery,
    returns={200: Media(MEDIA_TYPE)},
    errors=(404, 409, 503),
)
async def log_segments(shard: Shard, call: Call[SegmentsQuery, None]) -> Response:
    queue, partition = call.name("queue"), call.name("partition")
    frames = await shard.log_reader.segments(queue, partition, call.query.start, call.query.end)
    return Response(200, frames, MEDIA_TYPE.encode())
