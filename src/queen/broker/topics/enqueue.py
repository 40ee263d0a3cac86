"""Enqueues: the items of concurrent requests are stored by one statement."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from queen.broker.topics.batching import FairShare, FairShareMaker, Links, RequestBatcher
from queen.broker.topics.context import OnItemsDue
from queen.concurrency import BackgroundTasks
from queen.errors import RedisUnavailable
from queen.log.quotas import Quotas
from queen.log.topic_store import Entry, ItemIds, Stored, TopicStore
from queen.log.topics import TopicCatalog
from queen.metrics.meter import Meter
from queen.redis.interfaces import Keys
from queen.storage.database import Database, Fetcher
from queen.wire.topics.requests import EnqueueItem

_KEY_SECONDS: Final = 600.0


class SeenKeys:
    """Idempotency keys that were stored in the last minutes: with Redis by all workers, else by this one."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._tasks = BackgroundTasks()

    async def stop(self) -> None:
        await self._tasks.finish()

    async def repeated(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those of the entries, all with keys, that are probably duplicates."""
        found: list[Entry] = []
        for namespace, own in _by_namespace(entries).items():
            try:
                known = await self._keys.known(namespace, [entry.item.idempotency_key or "" for entry in own])
            except RedisUnavailable:
                return []
            found += [entry for entry in own if entry.item.idempotency_key in known]
        return found

    def add(self, entries: Iterable[Entry]) -> None:
        """Remember, in the background, the keys of entries that are stored."""
        self._tasks.spawn(self._add(_by_namespace(entries)))

    async def _add(self, entries: dict[str, list[Entry]]) -> None:
        for namespace, own in entries.items():
            try:
                await self._keys.learn(namespace, [entry.item.idempotency_key or "" for entry in own], _KEY_SECONDS)
            except RedisUnavailable:
                return


def _by_namespace(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.item.namespace, []).append(entry)
    return found


@dataclass(slots=True, eq=False)
class Enqueue:
    entries: list[Entry]
    answer: asyncio.Future[list[int]]


class Enqueuer:
    """Stores items, each with its idempotency key at most once."""

    def __init__(
        self,
        database: Database,
        catalog: TopicCatalog,
        ids: ItemIds,
        quotas: Quotas,
        keys: SeenKeys,
        on_items_due: OnItemsDue,
        meter: Meter,
        fair_share: FairShareMaker = FairShare,
    ) -> None:
        self._link = Links(database)
        self._catalog = catalog
        self._store = TopicStore(catalog, ids)
        self._quotas = quotas
        self._keys = keys
        self._on_items_due = on_items_due
        self._meter = meter
        self.batcher: RequestBatcher[Enqueue] = RequestBatcher(
            self._run,
            weigh=lambda request: len(request.entries),
            limit=5000,
            tenant=lambda request: request.entries[0].item.namespace,
            fair_share=fair_share,
        )

    async def enqueue(self, items: Sequence[EnqueueItem]) -> list[int]:
        """Store items; returns their ids in order, for a duplicate key that of the first item with it."""
        await self._quotas.admit(items)
        request = Enqueue([Entry(item) for item in items], asyncio.get_running_loop().create_future())
        self.batcher.submit(request)
        return await request.answer

    async def _run(self, batch: list[Enqueue]) -> None:
        entries = [entry for request in batch for entry in request.entries]
        keyed = [entry for entry in entries if entry.item.idempotency_key and not entry.settled]
        if keyed:
            await self._settle_repeated(await self._keys.repeated(keyed))
        stored = await self._store.store(self._link, entries)
        for request in batch:
            if not request.answer.done():
                request.answer.set_result([entry.id for entry in request.entries])
        self.settle(stored)
        if keyed:
            self._keys.add(keyed)

    async def _settle_repeated(self, entries: list[Entry]) -> None:
        """Give probable duplicates the ids of the first items, where PostgreSQL confirms them."""
        if not entries:
            return
        topics = await self._catalog.ensure({(entry.item.namespace, entry.item.topic) for entry in entries})
        found = [(entry, topics.get((entry.item.namespace, entry.item.topic))) for entry in entries]
        await self._store.settle_owned(self._link, [(entry, topic) for entry, topic in found if topic is not None])

    async def store(self, fetcher: Fetcher, entries: Sequence[Entry]) -> Stored:
        """Store items by statements of `fetcher`; `settle` is to be called once they are committed."""
        return await self._store.store(fetcher, entries)

    def settle(self, stored: Stored) -> None:
        """After the commit: count items, and wake waiting dequeues."""
        for key, count in stored.items.items():
            self._meter.topic_items("enqueued", *key, count)
        if stored.due:
            self._on_items_due(list(stored.due.items()))
