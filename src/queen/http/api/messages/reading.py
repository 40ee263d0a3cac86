"""Reading logs by offset, which consumes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from queen.broker.sharding.shard_router import ShardRouter, gather_by_key
from queen.http.auth import names
from queen.http.routing.call import Call
from queen.http.routing.context import Shard
from queen.http.routing.placement import Custom, Invoke, Placement, by_queue
from queen.http.routing.route import DATABASE, FOUND, SEALED, Media, RouteTable
from queen.http.server.message import Access, Response
from queen.wire.api.messages.reading import (
    UNKNOWN_PARTITION,
    Changed,
    ChangedBody,
    FetchBody,
    Fetched,
    LogPositions,
    PositionsQuery,
    SegmentsQuery,
    decode_changed,
    decode_fetch,
)
from queen.wire.segment import MEDIA_TYPE
from queen.wire.shards import Name

routes = RouteTable("Messages")


@routes.on_shard(
    "GET",
    "/api/v1/read/{queue}",
    access=Access.READ_ONLY,
    of_groups=False,
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
    of_groups=False,
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


def _entries_by_queue(merge: Any) -> Placement:
    """Each entry on the shard of its queue; `merge` makes one answer of the entries and of all answers."""

    async def place(shards: ShardRouter, invoke: Invoke, call: Call[None, Any]) -> Any:
        body = call.body
        answers: list[Any] = []

        async def ask(queue: str, indexes: Sequence[int]) -> list[Any]:
            some = replace(body, entries=[body.entries[index] for index in indexes])
            name = Name.queue(queue)
            for _ in range(2):
                shard = await shards.directory.find(name)
                answer = await shards.on_shard_of([name], lambda shard: invoke(shard, Call(call.request, None, some)))
                if all(entry.error != UNKNOWN_PARTITION for entry in answer.entries):
                    break
                # It may have been moved just now.
                await shards.directory.refresh([shard])
                if await shards.directory.find(name) == shard:
                    break
            answers.append(answer)
            return list(answer.entries)

        entries = await gather_by_key([entry.queue for entry in body.entries], ask)
        if not answers:
            return await invoke(0, call)
        return merge(entries, answers)

    return Custom(place)


@routes.on_shard(
    "POST",
    "/api/v1/fetch",
    access=Access.READ_ONLY,
    names=names.fetched,
    of_groups=False,
    placement=_entries_by_queue(lambda entries, answers: Fetched(entries)),
    summary="Messages of partitions by offset",
    description="Consumes nothing and needs no lease: a reader keeps its offsets by itself. What does not fit in "
    "`maxBytes` is left out; ask again from the offset after the last record.",
    body=FetchBody,
    decode=decode_fetch,
    body_example={"entries": [{"queue": "orders", "partition": "customer-7", "offset": 0}]},
    returns={200: Fetched},
    errors=SEALED,
)
async def fetch(shard: Shard, call: Call[None, FetchBody]) -> Fetched:
    return await shard.log_reader.fetch(call.body)


@routes.on_shard(
    "POST",
    "/api/v1/partitions/changed",
    access=Access.READ_ONLY,
    names=names.changed,
    of_groups=False,
    placement=_entries_by_queue(
        lambda entries, answers: Changed(entries, min(answer.safe_time for answer in answers)),
    ),
    id="changedPartitions",
    summary="Partitions of queues that were written to since a time",
    description="`safeTime` of an answer is the `since` of the next request: what was written before it is counted.",
    body=ChangedBody,
    decode=decode_changed,
    body_example={"entries": [{"queue": "orders", "since": "2026-04-26T10:59:28.267966Z"}]},
    returns={200: Changed},
    errors=DATABASE,
)
async def changed(shard: Shard, call: Call[None, ChangedBody]) -> Changed:
    return await shard.log_reader.changed(call.body.entries)
