"""Enqueueing: the items of concurrent requests are stored by one statement."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, TypeAlias

from queen.broker.topics.batching import Links, RequestBatcher
from queen.broker.topics.catalog import Topic, TopicCatalog, TopicKey, lock_keys
from queen.broker.topics.quotas import Quotas
from queen.broker.topics.throttle import TenantThrottle
from queen.concurrency import BackgroundTasks
from queen.errors import DatabaseUnavailable, Overloaded, RedisUnavailable
from queen.metrics.meter import Meter
from queen.redis.interfaces import Keys
from queen.storage.database import Database, Fetcher
from queen.wire.ids import NODES, SnowflakeSource
from queen.wire.topics import EnqueueItem

_SECONDS: Final = 600.0


class SeenKeys:
    """What was stored under a key, here or elsewhere, in the last minutes."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._errands = BackgroundTasks()

    async def stop(self) -> None:
        await self._errands.finish()

    async def repeated(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those of the entries, all with keys, that were probably stored before."""
        found: list[Entry] = []
        for namespace, own in _by_namespace(entries).items():
            try:
                known = await self._keys.known(namespace, [entry.item.idempotency_key or "" for entry in own])
            except RedisUnavailable:
                return []
            found += [entry for entry in own if entry.item.idempotency_key in known]
        return found

    def note(self, entries: Iterable[Entry]) -> None:
        """These were stored, or found to be; nobody waits until that is known everywhere."""
        self._errands.spawn(self._learn(_by_namespace(entries)))

    async def _learn(self, entries: dict[str, list[Entry]]) -> None:
        for namespace, own in entries.items():
            try:
                await self._keys.learn(namespace, [entry.item.idempotency_key or "" for entry in own], _SECONDS)
            except RedisUnavailable:
                return


def _by_namespace(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.item.namespace, []).append(entry)
    return found


_STRETCH_MS: Final = 60_000
# Eight million ids, for when no stretch can be reserved because PostgreSQL is away.
_KEPT_MS: Final = 2000


class ItemIds:
    """Gives out ids; about once a minute that takes a statement."""

    def __init__(self, database: Database, preferred_node: int | None, source: SnowflakeSource | None = None) -> None:
        self._database = database
        self._preferred = -1 if preferred_node is None else preferred_node % NODES
        self._source = source if source is not None else SnowflakeSource()

    async def take(self, count: int, *, offline: bool = False) -> list[int]:
        """New ids; with `offline`, also while PostgreSQL is away, out of what is kept back for then."""
        ids = self._source.take(count, keep_ms=_KEPT_MS)
        if ids is not None:
            return ids
        try:
            return await self._reserve(count)
        except DatabaseUnavailable:
            ids = self._source.take_kept(count, keep_ms=_KEPT_MS) if offline else None
            if ids is None:
                raise
            return ids

    async def _reserve(self, count: int) -> list[int]:
        ids = None
        while ids is None:
            rows = await self._database.fetch("topic_reserve_ids", self._source.now_ms(), _STRETCH_MS, self._preferred)
            if not rows:
                raise Overloaded("every node number for ids is being reserved by somebody else; try again soon")
            self._source.grant(rows[0]["node"], rows[0]["from_ms"], rows[0]["upto_ms"])
            ids = self._source.take(count, keep_ms=_KEPT_MS)
        return ids


OnFed: TypeAlias = Callable[[Sequence[tuple[TopicKey, float]]], None]
"""Told of topics that have new items, and in how many seconds the first of them is due."""

_MOST_ATTEMPTS: Final = 5


@dataclass(slots=True)
class Entry:
    """One item, and the id that it has or (as a duplicate) names; 0: not known yet.

    `settled`: it is stored, or a duplicate. Should the rest of its batch be refused, it is not stored again.
    """

    item: EnqueueItem
    id: int = 0
    settled: bool = False


@dataclass(slots=True, eq=False)
class Enqueue:
    entries: list[Entry]
    answer: asyncio.Future[list[int]]


@dataclass(slots=True)
class Stored:
    """What an enqueue did, to be told once it is committed."""

    fed: dict[TopicKey, float] = field(default_factory=dict)
    items: Counter[TopicKey] = field(default_factory=Counter)

    def note(self, entry: Entry, topic: Topic, at: datetime) -> None:
        item = entry.item
        self.items[topic.key] += 1
        wait = item.delay or 0.0
        if item.deliver_after is not None:
            wait = max(0.0, (item.deliver_after - at).total_seconds())
        known = self.fed.get(topic.key)
        if known is None or wait < known:
            self.fed[topic.key] = wait


class Enqueuer:
    """Stores items, each with its idempotency key at most once."""

    def __init__(
        self,
        database: Database,
        catalog: TopicCatalog,
        ids: ItemIds,
        quotas: Quotas,
        keys: SeenKeys,
        on_fed: OnFed,
        meter: Meter,
        courtesy: TenantThrottle | None = None,
    ) -> None:
        self._link = Links(database)
        self._catalog = catalog
        self._ids = ids
        self._quotas = quotas
        self._keys = keys
        self._on_fed = on_fed
        self._meter = meter
        self.lane: RequestBatcher[Enqueue] = RequestBatcher(
            self._run,
            weigh=lambda request: len(request.entries),
            limit=5000,
            tenant=lambda request: request.entries[0].item.namespace,
            courtesy=courtesy,
        )

    async def enqueue(self, items: Sequence[EnqueueItem]) -> list[int]:
        """Store items; gives their ids in the order of the items, a duplicate that of the first with its key."""
        await self._quotas.admit(items)
        request = Enqueue([Entry(item) for item in items], asyncio.get_running_loop().create_future())
        self.lane.submit(request)
        return await request.answer

    async def _run(self, batch: list[Enqueue]) -> None:
        entries = [entry for request in batch for entry in request.entries]
        keyed = [entry for entry in entries if entry.item.idempotency_key and not entry.settled]
        if keyed:
            await self._settle_repeated(await self._keys.repeated(keyed))
        stored = await self.store(self._link, entries)
        for request in batch:
            if not request.answer.done():
                request.answer.set_result([entry.id for entry in request.entries])
        self.settle(stored)
        if keyed:
            self._keys.note(keyed)

    async def _settle_repeated(self, entries: list[Entry]) -> None:
        """Give entries that seem to be duplicates the ids of the first, where PostgreSQL says that they are."""
        if not entries:
            return
        topics = await self._catalog.ensure({(entry.item.namespace, entry.item.topic) for entry in entries})
        homes = [(entry, topics.get((entry.item.namespace, entry.item.topic))) for entry in entries]
        await self._settle_owned(self._link, [(entry, topic) for entry, topic in homes if topic is not None])

    async def store(self, fetcher: Fetcher, entries: Sequence[Entry]) -> Stored:
        """Store items by statements of `fetcher`; `settle` is to be called once they are committed."""
        stored = Stored()
        waiting = [entry for entry in entries if not entry.settled]
        if not waiting:
            return stored
        for _ in range(_MOST_ATTEMPTS):
            topics = await self._catalog.ensure({(entry.item.namespace, entry.item.topic) for entry in waiting})
            ids = await self._ids.take(len(waiting))
            for entry, id in zip(waiting, ids, strict=True):
                entry.id = id
            waiting = await self._store(fetcher, waiting, topics, stored)
            if not waiting:
                return stored
        raise Overloaded("topics are being deleted while they are enqueued to; nothing is sure, try again soon")

    def settle(self, stored: Stored) -> None:
        """Committed: let those who wait know."""
        for key, count in stored.items.items():
            self._meter.topic_items("enqueued", *key, count)
        if stored.fed:
            self._on_fed(list(stored.fed.items()))

    async def _store(
        self, fetcher: Fetcher, entries: list[Entry], topics: dict[TopicKey, Topic], stored: Stored
    ) -> list[Entry]:
        """Returns what was not stored because its topic, or the owner of its key, has just gone."""
        homes = [topics.get((entry.item.namespace, entry.item.topic)) for entry in entries]
        housed = [(entry, topic) for entry, topic in zip(entries, homes, strict=True) if topic is not None]
        homeless = [entry for entry, topic in zip(entries, homes, strict=True) if topic is None]
        keyed = [(topic, entry.item.idempotency_key, entry) for entry, topic in housed if entry.item.idempotency_key]
        # In the same order as everybody else, so that nobody waits for each other in a circle.
        keyed.sort(key=lambda one: (one[0].namespace_id, one[1]))
        (row,) = await fetcher.fetch(
            "topic_enqueue",
            lock_keys({topic.id for _, topic in housed}),
            [topic.id for topic, _, _ in keyed],
            [key for _, key, _ in keyed],
            [entry.id for _, _, entry in keyed],
            [entry.id for entry, _ in housed],
            [topic.id for _, topic in housed],
            [entry.item.priority or 0 for entry, _ in housed],
            [entry.item.deliver_after for entry, _ in housed],
            [entry.item.delay for entry, _ in housed],
            [entry.item.ttl for entry, _ in housed],
            [entry.item.idempotency_key for entry, _ in housed],
            [entry.item.is_json for entry, _ in housed],
            [entry.item.stored_metadata for entry, _ in housed],
            [entry.item.stored_payload for entry, _ in housed],
        )
        new = set(row["ids"] or ())
        left: list[tuple[Entry, Topic]] = []
        for entry, topic in housed:
            if entry.id in new:
                entry.settled = True
                stored.note(entry, topic, row["at"])
            else:
                left.append((entry, topic))
        return homeless + await self._duplicates(fetcher, left)

    async def _duplicates(self, fetcher: Fetcher, left: list[tuple[Entry, Topic]]) -> list[Entry]:
        """Give duplicates the ids of the first; returns those that are none."""
        await self._settle_owned(fetcher, [(entry, topic) for entry, topic in left if entry.item.idempotency_key])
        again = []
        for entry, topic in left:
            if not entry.settled:
                self._catalog.forget(topic.key)
                again.append(entry)
        return again

    async def _settle_owned(self, fetcher: Fetcher, keyed: list[tuple[Entry, Topic]]) -> None:
        """Give entries whose key has an item the id of that."""
        if not keyed:
            return
        rows = await fetcher.fetch(
            "topic_key_owners",
            [topic.namespace_id for _, topic in keyed],
            [entry.item.idempotency_key for entry, _ in keyed],
        )
        for row in rows:
            entry, _ = keyed[row["place"] - 1]
            entry.id = row["item_id"]
            entry.settled = True
