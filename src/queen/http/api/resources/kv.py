"""Keys and values."""

from __future__ import annotations

from typing import Any

from queen.http.routing.call import Call
from queen.http.routing.context import Shard
from queen.http.routing.placement import Custom, Invoke
from queen.http.routing.route import DATABASE, RouteTable
from queen.http.server.message import Access
from queen.wire.kv import KvAnswer, KvBody, KvOperation, decode_kv, namespaces_of
from queen.wire.shards import Name

routes = RouteTable("Keys and values")


async def _place(shards: Any, invoke: Invoke, call: Call[None, list[KvOperation]]) -> Any:
    """Namespaces live with the queues of their names; those of one request have to be on one shard."""
    names = [Name.queue(ns) for ns in namespaces_of(call.body)]

    async def find() -> int:
        return int(await shards.one_shard(names, [], "the request"))

    return await shards.placed(find, lambda shard: invoke(shard, call))


@routes.on_shard(
    "POST",
    "/api/v1/kv",
    access=Access.READ_WRITE,
    placement=Custom(_place),
    id="kv",
    summary="Read and write keys",
    description="The operations happen in order and in one transaction. A write that does not apply is no error: its "
    "result says why, and what the key holds. A key that has expired does not exist.",
    body=KvBody,
    decode=decode_kv,
    body_example={
        "operations": [
            {"op": "putIfAbsent", "ns": "orders", "key": "order-1", "value": {"state": "held"}, "ttlSeconds": 60}
        ]
    },
    returns={200: KvAnswer},
    errors=DATABASE,
)
async def kv(shard: Shard, call: Call[None, list[KvOperation]]) -> KvAnswer:
    return await shard.broker.key_values.run(call.body)
