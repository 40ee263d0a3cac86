"""Requests that happen as a whole, so that all they are about has to live on one shard."""

from __future__ import annotations

from collections.abc import Sequence

from queen.broker.sharding.namespace_rules import NamespaceRules
from queen.errors import BadRequest
from queen.http.placement.batches import partition_number
from queen.http.placement.calls import Calls, Handlers, call
from queen.http.server.message import Request, Response, json_response
from queen.wire.shards import Name
from queen.wire.streams import decode_cycle, decode_registration, decode_state_query
from queen.wire.transaction import (
    AckItemOperation,
    AckOperation,
    EnqueueOperation,
    Operation,
    PushOperation,
    decode_transaction,
)


class Wholes:
    """Transactions, and the cycles of streaming queries."""

    def __init__(self, calls: Calls, rules: NamespaceRules) -> None:
        self._calls = calls
        self._directory = calls.directory
        self._rules = rules

    async def transaction(self, handlers: Handlers, request: Request) -> Response:
        operations = decode_transaction(request.body)
        names = [name for one in operations if (name := _name(one)) is not None]
        partitions = [partition_number(one.partition_id) for one in operations if isinstance(one, AckOperation)]
        items = [one.item for one in operations if isinstance(one, EnqueueOperation)]

        async def find() -> int:
            return await self._one_shard(names, partitions, "the transaction")

        shard = await find()
        await self._rules.admit(items, [shard] * len(items))
        if (await self._rules.claim(items, [shard] * len(items))).owners:
            raise BadRequest(
                "an idempotency key of the transaction belongs to an item on another shard: nothing was done;"
                " use another key, or enqueue outside of the transaction"
            )
        return await self._calls.placed(find, lambda shard: call(handlers[shard], request))

    async def cycle(self, handlers: Handlers, request: Request) -> Response:
        cycle = decode_cycle(request.body)
        names = list({item.queue: Name.queue(item.queue) for item in cycle.items}.values())
        partition = partition_number(cycle.partition_id)

        async def find() -> int:
            return await self._one_shard(names, [partition], "the cycle")

        return await self._calls.placed(find, lambda shard: call(handlers[shard], request))

    async def register(self, handlers: Handlers, request: Request) -> Response:
        """A query lives with its source."""
        registration = decode_registration(request.body)
        names = [Name.queue(registration.source_queue)]
        if registration.sink_queue is not None:
            names.append(Name.queue(registration.sink_queue))
        await self._one_shard(names, [], "the streaming query")
        return await self._calls.by_name(handlers, request, names[0])

    async def state(self, handlers: Handlers, request: Request) -> Response:
        try:
            asked = decode_state_query(request.body)
        except BadRequest as error:
            return json_response(400, {"success": False, "error": str(error)})
        return await self._calls.by_partition(handlers, request, partition_number(asked.partition_id))

    async def _one_shard(self, names: Sequence[Name], partitions: Sequence[int], what: str) -> int:
        """The shard on which everything is. Raises `BadRequest` that says what is where when it is on several."""
        places: dict[int, str] = {}
        for name in names:
            places.setdefault(await self._directory.find(name), str(name))
        for partition in partitions:
            if partition:
                places.setdefault(self._directory.of_partition(partition), "an acknowledged message")
        if len(places) > 1:
            told = " and ".join(f"{what} on shard {shard}" for shard, what in sorted(places.items()))
            raise BadRequest(
                f"{what} spans shards: {told}. Nothing was done: it can only be about what lives on one shard"
                " (`queen shards list` says what is where, `queen shards move` brings it together)"
            )
        return next(iter(places), self._directory.layout[0])


def _name(operation: Operation) -> Name | None:
    if isinstance(operation, PushOperation):
        return Name.queue(operation.item.queue)
    if isinstance(operation, EnqueueOperation):
        return Name.topic(operation.item.namespace, operation.item.topic)
    if isinstance(operation, AckItemOperation):
        return Name.topic(operation.ref.namespace, operation.ref.topic)
    return None
