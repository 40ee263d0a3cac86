"""Streaming queries: registering them, their cycles, their state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from queen.broker.transactions.stream_queries import HashMismatch
from queen.errors import BadRequest, NotFound
from queen.http.auth import names
from queen.http.routing.call import Call, Reply
from queen.http.routing.context import Shard
from queen.http.routing.placement import Custom, Everywhere, Invoke, by_partition
from queen.http.routing.route import DATABASE, FOUND, SEALED, RouteTable
from queen.http.server.message import Access
from queen.wire.api.resources.streams import (
    Cycle,
    CycleBody,
    RegisteredStream,
    Registration,
    StateQuery,
    StreamConflict,
    StreamCycleResult,
    StreamDeleted,
    StreamQuery,
    StreamState,
    decode_cycle,
    decode_registration,
    decode_state_query,
)
from queen.wire.fields import Error
from queen.wire.ids import partition_number
from queen.wire.shards import Name

routes = RouteTable("Streams")

_UNKNOWN: Final = "Query not found: GET /streams/v1/queries lists those that are registered"


async def _place_registration(shards: Any, invoke: Invoke, call: Call[None, Registration]) -> Any:
    """A query lives with its source, and its sink has to live there too."""
    names = [Name.queue(call.body.source_queue)]
    if call.body.sink_queue is not None:
        names.append(Name.queue(call.body.sink_queue))
    await shards.one_shard(names, [], "the streaming query")
    return await shards.on_shard_of(names[:1], lambda shard: invoke(shard, call))


async def _place_cycle(shards: Any, invoke: Invoke, call: Call[None, Cycle]) -> Any:
    """Everything that a cycle names has to live on one shard."""
    cycle = call.body
    names = list({item.queue: Name.queue(item.queue) for item in cycle.items}.values())
    partition = partition_number(cycle.partition_id)

    async def find() -> int:
        return int(await shards.one_shard(names, [partition], "the cycle"))

    return await shards.placed(find, lambda shard: invoke(shard, call))


@routes.on_shard(
    "POST",
    "/streams/v1/queries",
    access=Access.READ_WRITE,
    names=names.registered,
    of_groups=False,
    placement=Custom(_place_registration),
    id="registerStream",
    summary="Register a streaming query",
    description="A registered name is found again. With another fingerprint it is refused with 409, unless `reset` is "
    "sent.",
    body=Registration,
    decode=decode_registration,
    body_example={"name": "totals", "source_queue": "orders", "sink_queue": "order-totals", "config_hash": "9f2c"},
    returns={200: RegisteredStream, 409: StreamConflict},
    errors=DATABASE,
)
async def register(shard: Shard, call: Call[None, Registration]) -> RegisteredStream | Reply:
    try:
        return await shard.broker.stream_queries.register(call.body)
    except HashMismatch as error:
        return Reply(409, StreamConflict(False, error.query_id, call.body.name, str(error)))


def _by_name(answers: Sequence[Sequence[StreamQuery]]) -> list[StreamQuery]:
    return sorted((query for answer in answers for query in answer), key=lambda query: query.name)


@routes.on_shard(
    "GET",
    "/streams/v1/queries",
    access=Access.READ_ONLY,
    placement=Everywhere(_by_name),
    id="streams",
    summary="List streaming queries",
    returns={200: list[StreamQuery]},
    errors=DATABASE,
)
async def queries(shard: Shard, call: Call[None, None]) -> list[StreamQuery]:
    return await shard.broker.stream_queries.registered()


async def _place_deletion(shards: Any, invoke: Invoke, call: Call[None, None]) -> Any:
    """A name does not say on which shard its query lives."""

    async def attempt(shard: int) -> StreamDeleted | None:
        try:
            return cast(StreamDeleted, await invoke(shard, call))
        except NotFound:
            return None

    found = [answer for answer in await shards.on_every_shard(attempt) if answer is not None]
    if not found:
        raise NotFound(_UNKNOWN)
    return found[0]


@routes.on_shard(
    "DELETE",
    "/streams/v1/queries/{stream}",
    access=Access.ADMIN,
    placement=Custom(_place_deletion),
    id="deleteStream",
    summary="Delete a streaming query and its state",
    description="By its name. Its consumer group stays where it is, and so do the messages of its queues.",
    returns={200: StreamDeleted},
    errors=FOUND,
)
async def delete(shard: Shard, call: Call[None, None]) -> StreamDeleted:
    name = call.name("stream")
    rows = await shard.broker.stream_queries.delete(name)
    if rows is None:
        raise NotFound(_UNKNOWN)
    return StreamDeleted(True, name, rows)


@routes.on_shard(
    "POST",
    "/streams/v1/cycle",
    access=Access.READ_WRITE,
    names=names.cycle,
    placement=Custom(_place_cycle),
    id="commitStreamCycle",
    summary="Write state, push and acknowledge, all or nothing",
    description="A cycle that cannot be done is answered 200 with `success: false`. One that is sent again under the "
    "same lease, because its answer was lost, succeeds and changes nothing. Duplicates among the items are skipped.",
    body=CycleBody,
    decode=decode_cycle,
    body_example={
        "query_id": "6f1b9a52-0d52-4c84-9d0c-6a2f5f0b7d11",
        "partition_id": "51756565-0000-8000-8000-000000000001",
        "consumer_group": "streams.totals",
        "state_ops": [{"type": "upsert", "key": "tumb:60", "value": {"acc": 3, "windowEnd": 60000}}],
        "push_items": [{"queue": "order-totals", "payload": {"count": 3}}],
        "ack": {"transactionId": "order-1", "leaseId": "019ae0f0-7000-7000-8000-000000000001", "count": 3},
    },
    returns={200: StreamCycleResult},
    errors=SEALED,
)
async def cycle(shard: Shard, call: Call[None, Cycle]) -> StreamCycleResult:
    return await shard.broker.stream_cycles.run(call.body, call.request.subject)


def _decode_state_query(body: bytes) -> StateQuery | BadRequest:
    # Clients of this route read `success` of every answer.
    try:
        return decode_state_query(body)
    except BadRequest as error:
        return error


@routes.on_shard(
    "POST",
    "/streams/v1/state/get",
    access=Access.READ_ONLY,
    names=names.stream_state,
    of_groups=False,
    placement=by_partition("partition_id"),
    id="readStreamState",
    summary="Read the state of a query on a partition",
    description="More than 100 000 rows are refused; read them in pages, with `limit` and `after`.",
    body=StateQuery,
    decode=_decode_state_query,
    returns={200: StreamState},
    errors=SEALED,
)
async def state(shard: Shard, call: Call[None, StateQuery | BadRequest]) -> StreamState | Reply:
    try:
        if isinstance(call.body, BadRequest):
            raise call.body
        return await shard.broker.stream_queries.state(call.body)
    except BadRequest as error:
        return Reply(400, Error(str(error), success=False))
