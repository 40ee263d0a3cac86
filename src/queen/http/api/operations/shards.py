"""Shards: what lives there, and moving it to another."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from queen.broker.broker import Broker
from queen.errors import BadRequest, Conflict, DatabaseUnavailable
from queen.http.routing.call import Call, Reply
from queen.http.routing.context import Api
from queen.http.routing.route import DATABASE, RouteTable
from queen.http.server.message import Access
from queen.wire.api.operations.shards import MoveList, MoveView, ShardList, ShardMove, ShardMoved, ShardView
from queen.wire.push import check_name
from queen.wire.shards import Kind, Name
from queen.wire.times import iso_millis

if TYPE_CHECKING:
    from queen.broker.sharding.moves import ShardMoves

routes = RouteTable("System")


@routes.on_worker(
    "GET",
    "/api/v1/shards",
    access=Access.READ_ONLY,
    summary="Shards and what lives there",
    returns={200: ShardList},
    errors=DATABASE,
    cached=True,
)
async def list_shards(api: Api, call: Call[None, None]) -> ShardList:
    places = [_place(dsn) for dsn in api.settings.database_dsns]
    shards = zip(places, api.brokers, strict=True)
    return ShardList(shards=await asyncio.gather(*(_shard(number, *shard) for number, shard in enumerate(shards))))


@routes.on_worker(
    "POST",
    "/api/v1/shards/move",
    access=Access.ADMIN,
    summary="Move a queue or topic to another shard",
    description="It is used meanwhile as before. A move that takes longer than 20 seconds is answered 202 and goes on; "
    "one that is interrupted has moved it or has not, and can be repeated.",
    body=ShardMove,
    body_example={"queue": "orders", "to": 1},
    returns={200: ShardMoved, 202: ShardMoved},
    errors=(404, 409, 503),
)
async def move_to_shard(api: Api, call: Call[None, ShardMove]) -> ShardMoved | Reply:
    name, to = _name(call.body), call.body.to
    if api.moves is None:
        raise Conflict("there is one shard: DATABASE_URLS names no other")
    moved = await api.moves.move(name, to)
    answer = ShardMoved(str(name), to, bool(moved), moved is None)
    return Reply(202, answer) if moved is None else answer


@routes.on_worker(
    "GET",
    "/api/v1/shards/moves",
    access=Access.ADMIN,
    summary="Moves that have not ended",
    returns={200: MoveList},
    errors=DATABASE,
)
async def list_moves(api: Api, call: Call[None, None]) -> MoveList:
    found: dict[Name, MoveView] = {}
    for broker in api.brokers:
        try:
            rows = await broker.database.fetch("running_moves")
        except DatabaseUnavailable:
            continue
        for row in rows:
            name = Name(Kind(row["kind"]), row["name"])
            # Both shards have a record of it.
            found.setdefault(
                name, _move(api.moves, name, row["from_shard"], row["to_shard"], iso_millis(row["begun_at"]))
            )
    return MoveList(sorted(found.values(), key=lambda move: move.begun_at))


def _name(asked: ShardMove) -> Name:
    if asked.queue is not None and asked.namespace is None and asked.topic is None:
        check_name(asked.queue, "Queue", "queue")
        return Name.queue(asked.queue)
    if asked.queue is None and asked.namespace is not None and asked.topic is not None:
        check_name(asked.namespace, "Namespace", "namespace")
        check_name(asked.topic, "Topic", "topic")
        return Name.topic(asked.namespace, asked.topic)
    raise BadRequest("Must specify either 'queue' or 'namespace' and 'topic'")


def _move(moves: ShardMoves | None, name: Name, source: int, to: int, begun_at: str) -> MoveView:
    progress = moves.progress(name) if moves is not None else None
    if progress is None:
        return MoveView(str(name), source, to, begun_at, None, None, None)
    return MoveView(str(name), source, to, begun_at, progress.phase, progress.done, progress.total)


async def _shard(number: int, place: str, broker: Broker) -> ShardView:
    view = ShardView(shard=number, up=True, database=place)
    try:
        (row,) = await broker.database.fetch("shard_inventory")
    except DatabaseUnavailable:
        view.up = False
        return view
    view.queues, view.partitions = row["queues"], row["partitions"]
    view.topics, view.bytes = row["topics"], row["bytes"]
    return view


def _place(dsn: str) -> str:
    """Where a database is, without the user and password."""
    url = urlsplit(dsn)
    port = f":{url.port}" if url.port else ""
    return f"{url.hostname or 'local socket'}{port}{url.path}"
