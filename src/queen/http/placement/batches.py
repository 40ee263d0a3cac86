"""Requests that hold several things, each of which has its shard: cut up, sent, and their answers put back in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from queen.broker.sharding.namespace_rules import NamespaceRules
from queen.errors import QueenError
from queen.http.placement.calls import Apart, Calls, Handlers, call, with_body
from queen.http.server.message import Request, Response
from queen.wire.ack import decode_ack, decode_ack_batch
from queen.wire.ids import parse_partition_uuid
from queen.wire.push import decode_push
from queen.wire.shards import Name
from queen.wire.topics import decode_acks, decode_enqueue

_REFUSED: Final = b'"success":false'
_ATTEMPTS: Final = 4

K = TypeVar("K", bound=Hashable)
Outcome = dict[str, Any]


class _Push(msgspec.Struct, omit_defaults=True):
    items: list[msgspec.Raw]
    buffer_ms: msgspec.Raw | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="bufferMs")
    buffer_max: msgspec.Raw | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="bufferMax")


class _Acks(msgspec.Struct, omit_defaults=True):
    acknowledgments: list[msgspec.Raw]
    group: msgspec.Raw | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="consumerGroup")


_push = msgspec.json.Decoder(_Push)
_acks = msgspec.json.Decoder(_Acks)
_raws = msgspec.json.Decoder(list[msgspec.Raw])
_outcomes = msgspec.json.Decoder(list[Outcome])


class Batches:
    """Pushes, acknowledgments and what topics are sent in arrays."""

    def __init__(self, calls: Calls, rules: NamespaceRules) -> None:
        self._calls = calls
        self._directory = calls.directory
        self._rules = rules

    async def push(self, handlers: Handlers, request: Request) -> Response:
        """All of it is stored where its queues live; what goes to one shard is stored as a whole."""
        items = decode_push(request.body).items
        names = {item.queue: Name.queue(item.queue) for item in items}
        shards = {queue: await self._directory.find(name) for queue, name in names.items()}
        if len(set(shards.values())) <= 1:
            return await self._push_to_one(handlers, request, list(names.values()))
        body = _push.decode(request.body)
        groups = _grouped([shards[item.queue] for item in items])

        async def part(indexes: Sequence[int]) -> Response:
            some = msgspec.structs.replace(body, items=[body.items[index] for index in indexes])
            # Should one of its queues move meanwhile, it is cut up once more.
            return await self.push(handlers, with_body(request, msgspec.json.encode(some)))

        outcomes = await _spread(
            groups,
            part,
            lambda index: {
                "transaction_id": items[index].transaction_id,
                "status": "failed",
                "queueName": items[index].queue,
            },
        )
        return Response(201, msgspec.json.encode([one | {"index": index} for index, one in enumerate(outcomes)]))

    async def _push_to_one(self, handlers: Handlers, request: Request, names: list[Name]) -> Response:
        if not names:
            return await call(handlers[self._directory.layout[0]], request)
        try:
            return await self._calls.on_shard_of(names, lambda shard: call(handlers[shard], request))
        except Apart:
            # Nothing was stored: whoever refuses one queue refuses all that came with it.
            return await self.push(handlers, request)

    async def ack(self, handlers: Handlers, request: Request) -> Response:
        item, _ = decode_ack(request.body)
        return await self._calls.by_partition(handlers, request, partition_number(item.partition_id))

    async def ack_batch(self, handlers: Handlers, request: Request) -> Response:
        """Each acknowledgment goes to the shard of its partition."""
        items, _ = decode_ack_batch(request.body)
        partitions = [partition_number(item.partition_id) for item in items]
        shards = [self._directory.of_partition(partition) for partition in partitions]
        if len(set(shards)) <= 1:
            response = await call(handlers[shards[0] if shards else self._directory.layout[0]], request)
            if _REFUSED not in response.body:
                return response
            outcomes = _outcomes.decode(response.body)
            left = await self._moved(outcomes, partitions, shards)
            if not left:
                return response
        else:
            outcomes, left = [{}] * len(items), list(range(len(items)))
        body = _acks.decode(request.body)
        for _ in range(_ATTEMPTS):
            groups = [[left[place] for place in group] for group in _grouped([shards[index] for index in left])]
            await self._ack_some(handlers, request, body, groups, shards, outcomes)
            left = await self._moved(outcomes, partitions, shards)
            if not left:
                break
        return Response(200, msgspec.json.encode([one | {"index": index} for index, one in enumerate(outcomes)]))

    async def _ack_some(
        self,
        handlers: Handlers,
        request: Request,
        body: _Acks,
        groups: Sequence[Sequence[int]],
        shards: Sequence[int],
        outcomes: list[Outcome],
    ) -> None:
        async def part(indexes: Sequence[int]) -> Response:
            some = msgspec.structs.replace(body, acknowledgments=[body.acknowledgments[index] for index in indexes])
            return await call(handlers[shards[indexes[0]]], with_body(request, msgspec.json.encode(some)))

        def failed(index: int) -> Outcome:
            sent = msgspec.json.decode(body.acknowledgments[index])
            return {"transactionId": sent["transactionId"], "success": False, "leaseReleased": False, "dlq": False}

        for indexes, found in zip(groups, await _ask(groups, part, failed), strict=True):
            for index, one in zip(indexes, found, strict=True):
                outcomes[index] = one

    async def _moved(self, outcomes: Sequence[Outcome], partitions: Sequence[int], shards: list[int]) -> list[int]:
        """Which of those that were refused are on another shard by now; `shards` is corrected."""
        refused = [index for index, one in enumerate(outcomes) if not one.get("success")]
        if not refused:
            return []
        await self._directory.look(sorted({shards[index] for index in refused}))
        moved = []
        for index in refused:
            shard = self._directory.of_partition(partitions[index])
            if shard != shards[index]:
                shards[index] = shard
                moved.append(index)
        return moved

    async def enqueue(self, handlers: Handlers, request: Request) -> Response:
        """Items are stored where their topics live, those of one topic together.

        A key is claimed for its shard before its item is stored.
        """
        items = decode_enqueue(request.body)
        names = [Name.topic(item.namespace, item.topic) for item in items]
        shards = [await self._directory.find(name) for name in names]
        await self._rules.admit(items, shards)
        duplicates = await self._rules.claim(items, shards)
        if not duplicates and len(set(names)) == 1:
            return await self._calls.by_name(handlers, request, names[0])
        raws = _raws.decode(request.body) if request.body.lstrip()[:1] == b"[" else [msgspec.Raw(request.body)]
        fresh = [index for index in range(len(items)) if index not in duplicates]
        groups = [[fresh[place] for place in group] for group in _grouped([names[index] for index in fresh])]

        async def part(indexes: Sequence[int]) -> Response:
            again = with_body(request, msgspec.json.encode([raws[index] for index in indexes]))
            return await self._calls.by_name(handlers, again, names[indexes[0]])

        answers = await asyncio.gather(*(part(indexes) for indexes in groups))
        as_text = request.query.get("ids") == "string" or request.headers.get(b"x-queen-ids") == b"string"
        ids: dict[int, Any] = {place: str(id) if as_text else id for place, id in duplicates.owners.items()}
        for indexes, answer in zip(groups, answers, strict=True):
            ids |= zip(indexes, msgspec.json.decode(answer.body), strict=True)
        ids |= {place: ids[first] for place, first in duplicates.twins.items()}
        return Response(200, msgspec.json.encode([ids[index] for index in range(len(items))]))

    async def settle(self, handlers: Handlers, request: Request) -> Response:
        """Acks, nacks, extensions and what is done to dead letters: each goes to the shard of its topic."""
        refs, several = decode_acks(request.body)
        names = [Name.topic(ref.namespace, ref.topic) for ref in refs]
        if not several:
            return await self._calls.by_name(handlers, request, names[0])
        raws = _raws.decode(request.body)

        async def part(indexes: Sequence[int]) -> Response:
            return await self._settle_of_one(handlers, request, names[indexes[0]], [raws[index] for index in indexes])

        outcomes = await _spread(_grouped(names), part, lambda index: {"id": refs[index].number, "success": False})
        return Response(200, msgspec.json.encode(outcomes))

    async def _settle_of_one(
        self, handlers: Handlers, request: Request, name: Name, raws: Sequence[msgspec.Raw]
    ) -> Response:
        """Of one topic: what is refused is tried once more where the topic is by then."""
        shard = await self._directory.find(name)
        response = await call(handlers[shard], with_body(request, msgspec.json.encode(raws)))
        for _ in range(_ATTEMPTS):
            if _REFUSED not in response.body:
                return response
            await self._directory.look([shard])
            now = await self._directory.find(name)
            if now == shard:
                return response
            shard = now
            outcomes = _outcomes.decode(response.body)
            refused = [index for index, one in enumerate(outcomes) if not one["success"]]
            again = with_body(request, msgspec.json.encode([raws[index] for index in refused]))
            answer = await call(handlers[shard], again)
            for index, one in zip(refused, _outcomes.decode(answer.body), strict=True):
                outcomes[index] = one
            response = Response(200, msgspec.json.encode(outcomes))
        return response


def partition_number(text: str) -> int:
    """The partition that a public id names; 0, which no partition has, when it is not one."""
    place = parse_partition_uuid(text)
    return place[1] if place is not None and place[0] == 0 else 0


def _grouped(keys: Sequence[K]) -> list[list[int]]:
    """The places of equal keys."""
    groups: dict[K, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return list(groups.values())


async def _spread(
    groups: Sequence[Sequence[int]],
    part: Callable[[Sequence[int]], Awaitable[Response]],
    failed: Callable[[int], Outcome],
) -> list[Outcome]:
    """What became of each thing, in the order of the request."""
    outcomes: list[Outcome] = [{}] * sum(len(indexes) for indexes in groups)
    for indexes, found in zip(groups, await _ask(groups, part, failed), strict=True):
        for index, one in zip(indexes, found, strict=True):
            outcomes[index] = one
    return outcomes


async def _ask(
    groups: Sequence[Sequence[int]],
    part: Callable[[Sequence[int]], Awaitable[Response]],
    failed: Callable[[int], Outcome],
) -> list[list[Outcome]]:
    """What became of each group. An error is told item by item where others have been served, else raised."""
    answers = await asyncio.gather(*(part(indexes) for indexes in groups), return_exceptions=True)
    served = any(isinstance(answer, Response) for answer in answers)
    found: list[list[Outcome]] = []
    for indexes, answer in zip(groups, answers, strict=True):
        if isinstance(answer, Response):
            found.append(_outcomes.decode(answer.body))
        elif isinstance(answer, QueenError) and served:
            found.append([failed(index) | {"error": str(answer)} for index in indexes])
        else:
            raise answer
    return found
