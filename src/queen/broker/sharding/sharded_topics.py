"""Topics on several shards: the components of a broker's topics."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, TypeVar

import asyncpg

from queen.broker.broker import Broker
from queen.broker.sharding.directory import Directory
from queen.broker.sharding.namespace_rules import NamespaceRules
from queen.broker.sharding.shard_router import ShardRouter, gather_by_key
from queen.broker.topics.dequeue import Dequeue
from queen.broker.topics.settle import Nacked
from queen.errors import BadRequest, QueenError
from queen.log.topics import TopicKey
from queen.wire.shards import Name
from queen.wire.topics.items import Row
from queen.wire.topics.requests import EnqueueItem, ExtendRef, ItemRef, NackRef

log = logging.getLogger(__name__)

Ref = TypeVar("Ref", bound=ItemRef)
R = TypeVar("R")

_ATTEMPTS: Final = 4
_MOST_PAUSE: Final = 0.25
_LEAST_PAUSE: Final = 0.01


class ShardedTopics:
    """The parts that work on topics of any shard."""

    def __init__(self, router: ShardRouter, rules: NamespaceRules, brokers: Sequence[Broker]) -> None:
        self.writer = ShardedTopicWriter(router, rules, brokers)
        self.dequeuer = ShardedDequeuer(router, brokers)
        self.multi_dequeuer = ShardedMultiTopicDequeuer(router, brokers)
        self.settler = ShardedSettler(router, brokers)
        self.dead_letters = ShardedTopicDeadLetters(router, brokers)


class ShardedTopicWriter:
    """Stores items where their topics live, those of one topic together.

    An idempotency key is claimed for its shard before its item is stored.
    """

    def __init__(self, router: ShardRouter, rules: NamespaceRules, brokers: Sequence[Broker]) -> None:
        self._router = router
        self._rules = rules
        self._brokers = brokers

    async def enqueue(self, items: Sequence[EnqueueItem]) -> list[int]:
        names = [Name.topic(item.namespace, item.topic) for item in items]
        shards = [await self._router.directory.find(name) for name in names]
        await self._rules.admit(items, shards)
        duplicates = await self._rules.claim(items, shards)
        fresh = [index for index in range(len(items)) if index not in duplicates]

        async def enqueue(name: Name, places: Sequence[int]) -> list[int]:
            some = [items[fresh[place]] for place in places]
            return await self._router.on_shard_of(
                [name], lambda shard: self._brokers[shard].topics.writer.enqueue(some)
            )

        stored = await gather_by_key([names[index] for index in fresh], enqueue)
        ids = {**duplicates.owners, **dict(zip(fresh, stored, strict=True))}
        ids |= {place: ids[first] for place, first in duplicates.twins.items()}
        return [ids[index] for index in range(len(items))]


class ShardedDequeuer:
    """Leases items where their topic lives; a dequeue that waits goes with its topic when that moves."""

    def __init__(self, router: ShardRouter, brokers: Sequence[Broker]) -> None:
        self._router = router
        self._directory = router.directory
        self._brokers = brokers

    def dequeue(
        self, key: TopicKey, limit: int, lease_seconds: float | None, wait_seconds: float
    ) -> asyncio.Future[Sequence[Row]]:
        return asyncio.ensure_future(self._dequeue(key, limit, lease_seconds, wait_seconds))

    async def _dequeue(
        self, key: TopicKey, limit: int, lease_seconds: float | None, wait_seconds: float
    ) -> Sequence[Row]:
        name = Name.topic(*key)
        if wait_seconds <= 0:
            return await self._router.on_shard_of(
                [name], lambda shard: self._brokers[shard].topics.dequeuer.dequeue(key, limit, lease_seconds, 0.0)
            )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds

        def find() -> Coroutine[Any, Any, int]:
            return self._directory.find(name)

        while True:
            shard = await find()
            left = max(0.0, deadline - loop.time())
            asked = self._brokers[shard].topics.dequeuer.begin(key, limit, lease_seconds, left)
            items = await _unless_moved(self._directory, asked, find, shard)
            if items is not None:
                return items


async def _unless_moved(
    directory: Directory, asked: Dequeue, find: Callable[[], Awaitable[object]], place: object
) -> Sequence[Row] | None:
    """The items of a dequeue; None when `find` gives another place before there are any."""
    try:
        moved = await directory.moves_before(asked.answer, find, place)
    except BaseException:
        if not asked.answer.cancel() and not asked.answer.cancelled():
            # Retrieved, so that asyncio does not log it as never retrieved.
            asked.answer.exception()
        raise
    if not moved:
        return asked.answer.result()
    # What was leased before the topic moved is leased still, and is taken.
    asked.expire()
    try:
        return await asked.answer or None
    except (QueenError, asyncpg.PostgresError) as error:
        log.debug("dequeue: failed on the shard that the topic has left: %s", error)
        return None


@dataclass(slots=True, eq=False)
class ShardedMultiTopicDequeue:
    """A request for items of several topics on several shards."""

    answer: asyncio.Future[list[Any]]
    topics: dict[int, str] = field(default_factory=dict)
    """The names of the topics of its items."""


class ShardedMultiTopicDequeuer:
    """Leases the heads of every shard, keeps the first of them in the order of service, and releases the rest."""

    def __init__(self, router: ShardRouter, brokers: Sequence[Broker]) -> None:
        self._directory = router.directory
        self._brokers = brokers

    def dequeue(
        self, namespace: str, names: Collection[str], limit: int, lease_seconds: float | None, wait_seconds: float
    ) -> ShardedMultiTopicDequeue:
        topics: dict[int, str] = {}
        work = self._dequeue(namespace, names, limit, lease_seconds, wait_seconds, topics)
        return ShardedMultiTopicDequeue(asyncio.ensure_future(work), topics)

    async def _dequeue(
        self,
        namespace: str,
        names: Collection[str],
        limit: int,
        lease_seconds: float | None,
        wait_seconds: float,
        topics: dict[int, str],
    ) -> list[Any]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        pause = _LEAST_PAUSE
        while True:
            places = await self._places(namespace, names)
            if len(places) == 1:
                ((shard, some),) = places.items()
                left = max(0.0, deadline - loop.time()) if wait_seconds > 0 else 0.0
                asked = self._brokers[shard].topics.multi_dequeuer.dequeue(namespace, some, limit, lease_seconds, left)
                items = await _unless_moved(self._directory, asked, lambda: self._places(namespace, names), places)
                if items is None:
                    continue
                topics.update(asked.topics)
                return list(items)
            rows = await self._round(namespace, places, limit, lease_seconds, topics)
            remaining = deadline - loop.time()
            if rows or remaining <= 0:
                return rows
            await asyncio.sleep(min(pause, remaining))
            pause = min(_MOST_PAUSE, pause * 2)

    async def _places(self, namespace: str, names: Collection[str]) -> dict[int, list[str]]:
        """The topics to ask each shard for; none: all it has of the namespace."""
        if not names:
            return {shard: [] for shard in range(len(self._brokers))}
        while True:
            changed = self._directory.changed()
            places: dict[int, list[str]] = {}
            for name in names:
                places.setdefault(await self._directory.find(Name.topic(namespace, name)), []).append(name)
            # A move during the search may be that of a topic that was found before it.
            if not changed.is_set():
                return places

    async def _round(
        self,
        namespace: str,
        places: dict[int, list[str]],
        limit: int,
        lease_seconds: float | None,
        topics: dict[int, str],
    ) -> list[Any]:
        asked = {
            shard: self._brokers[shard].topics.multi_dequeuer.dequeue(namespace, names, limit, lease_seconds, 0.0)
            for shard, names in places.items()
        }
        answers = await asyncio.gather(*(request.answer for request in asked.values()), return_exceptions=True)
        heads: dict[int, list[Any]] = {}
        failures: list[BaseException] = []
        for (shard, request), answer in zip(asked.items(), answers, strict=True):
            if not isinstance(answer, BaseException):
                heads[shard] = list(answer)
                topics.update(request.topics)
            elif isinstance(answer, QueenError | asyncpg.PostgresError) and not isinstance(answer, BadRequest):
                log.warning("dequeue: shard %d was skipped: %s", shard, answer)
                failures.append(answer)
            else:
                raise answer
        if not heads:
            raise failures[0]
        return await self._keep_first(heads, namespace, limit, topics)

    async def _keep_first(
        self, heads: dict[int, list[Any]], namespace: str, limit: int, topics: dict[int, str]
    ) -> list[Any]:
        """The first `limit` items over all shards; the leases of the others are released."""
        ranked = [[(_rank(row), shard, row) for row in rows] for shard, rows in heads.items()]
        merged = list(heapq.merge(*ranked, key=lambda one: one[:2]))
        kept = [row for _, _, row in merged[:limit]]
        for shard in heads:
            back = [row for _, place, row in merged[limit:] if place == shard]
            if not back:
                continue
            refs = [ItemRef(row["id"], namespace, topics[row["topic_id"]], row["lease_owner"]) for row in back]
            released = await self._brokers[shard].topics.settler.release(refs)
            # Items delivered at most once are settled already: better a few over the limit than lost ones.
            kept += [row for row, outcome in zip(back, released, strict=True) if outcome is None]
        return kept


class _ByTopic:
    """Settles items on the shards of their topics."""

    def __init__(self, router: ShardRouter, brokers: Sequence[Broker]) -> None:
        self._directory = router.directory
        self._brokers = brokers

    async def _settle(
        self, refs: Sequence[Ref], settle: Callable[[Broker, Sequence[Ref]], Awaitable[Sequence[R | None]]]
    ) -> list[Any]:
        """The outcome of each; an error where its shard failed and another did not."""

        def ask(name: Name, indexes: Sequence[int]) -> Awaitable[Sequence[Any]]:
            return self._of_topic(name, [refs[index] for index in indexes], settle)

        names = [Name.topic(ref.namespace, ref.topic) for ref in refs]
        return await gather_by_key(names, ask, lambda index, error: error)

    async def _of_topic(
        self,
        name: Name,
        refs: Sequence[Ref],
        settle: Callable[[Broker, Sequence[Ref]], Awaitable[Sequence[R | None]]],
    ) -> list[R | None]:
        """Items of one topic; rejected ones are retried if the topic has moved."""
        shard = await self._directory.find(name)
        outcomes = list(await settle(self._brokers[shard], refs))
        for _ in range(_ATTEMPTS):
            refused = [index for index, outcome in enumerate(outcomes) if outcome is None]
            if not refused:
                break
            await self._directory.refresh([shard])
            now = await self._directory.find(name)
            if now == shard:
                break
            shard = now
            again = await settle(self._brokers[shard], [refs[index] for index in refused])
            for index, outcome in zip(refused, again, strict=True):
                outcomes[index] = outcome
        return outcomes


class ShardedSettler(_ByTopic):
    """Acks, nacks, extensions and releases."""

    async def ack(self, refs: Sequence[ItemRef]) -> list[bool | None]:
        return await self._settle(refs, lambda broker, some: broker.topics.settler.ack(some))

    async def nack(self, refs: Sequence[NackRef]) -> list[Nacked | None]:
        return await self._settle(refs, lambda broker, some: broker.topics.settler.nack(some))

    async def extend(self, refs: Sequence[ExtendRef]) -> list[datetime | None]:
        return await self._settle(refs, lambda broker, some: broker.topics.settler.extend(some))

    async def release(self, refs: Sequence[ItemRef]) -> list[bool | None]:
        return await self._settle(refs, lambda broker, some: broker.topics.settler.release(some))

    async def set_lease(self, refs: Sequence[ItemRef], seconds: Sequence[float]) -> list[bool | None]:
        wanted = {id(ref): lasting for ref, lasting in zip(refs, seconds, strict=True)}
        return await self._settle(
            refs, lambda broker, some: broker.topics.settler.set_lease(some, [wanted[id(ref)] for ref in some])
        )


class ShardedTopicDeadLetters(_ByTopic):
    """Deletes and retries dead letters."""

    async def delete(self, refs: Sequence[ItemRef]) -> list[bool | None]:
        return await self._settle(refs, lambda broker, some: broker.topics.dead_letters.delete(some))

    async def retry(self, refs: Sequence[ItemRef]) -> list[bool | None]:
        return await self._settle(refs, lambda broker, some: broker.topics.dead_letters.retry(some))


def _rank(row: Any) -> tuple[int, datetime, int]:
    return row["priority"], row["deliver_after"], row["id"]
