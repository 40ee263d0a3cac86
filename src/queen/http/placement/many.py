"""Dequeueing from several topics as if they were one, although they lie on several shards."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import asyncpg
import msgspec

from queen.broker.broker import Broker
from queen.errors import BadRequest, QueenError
from queen.http.placement.calls import Calls, Handlers, call, with_query
from queen.http.server.message import Request, Response
from queen.wire.shards import Name
from queen.wire.topics import ItemRef, decode_names

log = logging.getLogger(__name__)

_LONGEST_NAP: Final = 0.25
_SHORTEST_NAP: Final = 0.01
_BY_DEFAULT: Final = 10
_MOST: Final = 10_000

Item = dict[str, Any]


class ManyTopics:
    """Leases the heads of every shard, keeps the first of them by their order of service, and gives the rest back."""

    def __init__(self, calls: Calls, brokers: Sequence[Broker]) -> None:
        self._directory = calls.directory
        self._brokers = brokers
        self._default_timeout_ms = brokers[0].settings.default_timeout

    async def dequeue(self, handlers: Handlers, request: Request) -> Response:
        namespace = request.query.get("namespace", "")
        names = decode_names(request.query.get("topics", ""), "topics")
        limit = min(_MOST, max(1, request.query_int("limit", _BY_DEFAULT)))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max(0, request.query_int("timeout", self._default_timeout_ms)) / 1000
        nap = _SHORTEST_NAP
        while True:
            places = await self._places(namespace, names)
            if len(places) == 1:
                left = max(0, round(1000 * (deadline - loop.time())))
                (shard,) = places
                return await call(handlers[shard], with_query(request, timeout=left))
            items = await self._round(handlers, request, namespace, places, limit)
            left_seconds = deadline - loop.time()
            if items or not request.query_bool("wait", False) or left_seconds <= 0 or request.disconnected:
                return Response(200, msgspec.json.encode(items))
            await asyncio.sleep(min(nap, left_seconds))
            nap = min(_LONGEST_NAP, nap * 2)

    async def _places(self, namespace: str, names: Sequence[str] | None) -> dict[int, list[str] | None]:
        """The topics to ask each shard for; None: all it has of the namespace."""
        if not names:
            return dict.fromkeys(range(len(self._brokers)))
        places: dict[int, list[str] | None] = {}
        for name in names:
            shard = await self._directory.find(Name.topic(namespace, name))
            some = places.setdefault(shard, [])
            assert some is not None
            some.append(name)
        return places

    async def _round(
        self,
        handlers: Handlers,
        request: Request,
        namespace: str,
        places: dict[int, list[str] | None],
        limit: int,
    ) -> list[Item]:
        async def ask(shard: int, names: list[str] | None) -> list[Item]:
            topics = msgspec.json.encode(names).decode() if names is not None else ""
            response = await call(handlers[shard], with_query(request, wait="false", topics=topics))
            items: list[Item] = msgspec.json.decode(response.body)
            return items

        answers = await asyncio.gather(*(ask(shard, names) for shard, names in places.items()), return_exceptions=True)
        heads: dict[int, list[Item]] = {}
        failures: list[BaseException] = []
        for shard, answer in zip(places, answers, strict=True):
            if not isinstance(answer, BaseException):
                heads[shard] = answer
            elif isinstance(answer, QueenError | asyncpg.PostgresError) and not isinstance(answer, BadRequest):
                failures.append(answer)
            else:
                raise answer
        if not heads:
            raise failures[0]
        for failure in failures:
            log.warning("a shard is left out of a dequeue: %s", failure)
        return await self._keep_first(heads, namespace, limit)

    async def _keep_first(self, heads: dict[int, list[Item]], namespace: str, limit: int) -> list[Item]:
        """The first so many over all shards; those behind them are ready again."""
        merged = list(heapq.merge(*([(_rank(one), shard, one) for one in some] for shard, some in heads.items())))
        kept = [one for _, _, one in merged[:limit]]
        for shard in heads:
            back = [one for _, place, one in merged[limit:] if place == shard]
            if not back:
                continue
            refs = [ItemRef(int(one["id"]), namespace, one["topic"], one.get("lease_owner")) for one in back]
            released = await self._brokers[shard].topics.settler.release(refs)
            # What is delivered at most once is gone already: rather a few more than were asked for than lost.
            kept += [one for one, outcome in zip(back, released, strict=True) if outcome is None]
        return kept


def _rank(one: Item) -> tuple[int, datetime, int]:
    return one["priority"], datetime.fromisoformat(one["deliver_after"]), int(one["id"])
