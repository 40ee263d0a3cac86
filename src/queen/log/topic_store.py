"""Stores items of topics, each with its idempotency key at most once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from queen.errors import DatabaseUnavailable, Overloaded
from queen.log.quotas import Quotas
from queen.log.topics import Topic, TopicCatalog, TopicKey, lock_keys
from queen.storage.database import Database, Fetcher
from queen.wire.ids import NODES, SnowflakeSource
from queen.wire.topics.requests import EnqueueItem

_RANGE_MS: Final = 60_000
# Eight million ids, for when no range can be reserved because PostgreSQL is unavailable.
_KEPT_MS: Final = 2000


class ItemIds:
    """Allocates ids; about once a minute this takes a statement."""

    def __init__(self, database: Database, preferred_node: int | None, source: SnowflakeSource | None = None) -> None:
        self._database = database
        self._preferred = -1 if preferred_node is None else preferred_node % NODES
        self._source = source if source is not None else SnowflakeSource()
        self._has_kept = False

    async def reserve(self) -> None:
        """Reserve ids for `offline`, unless there are some."""
        if not self._has_kept:
            await self._reserve()

    async def take(self, count: int, *, offline: bool = False) -> list[int]:
        """New ids; with `offline`, also while PostgreSQL is unavailable, out of a reserve."""
        ids = self._source.take(count, keep_ms=_KEPT_MS)
        if ids is not None:
            return ids
        try:
            while ids is None:
                await self._reserve()
                ids = self._source.take(count, keep_ms=_KEPT_MS)
        except DatabaseUnavailable:
            ids = self._source.take_kept(count, keep_ms=_KEPT_MS) if offline else None
            if ids is None:
                raise
            self._has_kept = False
        return ids

    async def _reserve(self) -> None:
        rows = await self._database.fetch("topic_reserve_ids", self._source.now_ms(), _RANGE_MS, self._preferred)
        if not rows:
            raise Overloaded("all node numbers for item ids are being reserved by other sessions; retry")
        self._source.grant(rows[0]["node"], rows[0]["from_ms"], rows[0]["upto_ms"])
        self._has_kept = True


_MOST_ATTEMPTS: Final = 5


@dataclass(slots=True)
class Entry:
    """One item, and the id that it has or (as a duplicate) names; 0: not known yet.

    `settled`: it is stored, or a duplicate. Should the rest of its batch be refused, it is not stored again.
    """

    item: EnqueueItem
    id: int = 0
    settled: bool = False


@dataclass(slots=True)
class Stored:
    """What an enqueue stored, to be announced once it is committed."""

    due: dict[TopicKey, float] = field(default_factory=dict)
    items: Counter[TopicKey] = field(default_factory=Counter)

    def note(self, entry: Entry, topic: Topic, at: datetime) -> None:
        item = entry.item
        self.items[topic.key] += 1
        wait = item.delay or 0.0
        if item.deliver_after is not None:
            wait = max(0.0, (item.deliver_after - at).total_seconds())
        known = self.due.get(topic.key)
        if known is None or wait < known:
            self.due[topic.key] = wait


class TopicStore:
    """Stores items by statements of a connection or transaction."""

    def __init__(self, catalog: TopicCatalog, ids: ItemIds) -> None:
        self._catalog = catalog
        self._ids = ids

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
            waiting = await self._store_once(fetcher, waiting, topics, stored)
            if not waiting:
                return stored
        raise Overloaded("topics are being deleted while they are enqueued to; some items may be stored; try again")

    async def _store_once(
        self, fetcher: Fetcher, entries: list[Entry], topics: dict[TopicKey, Topic], stored: Stored
    ) -> list[Entry]:
        """Returns the entries not stored because their topic, or the owner of their key, has just been removed."""
        own_topics = [topics.get((entry.item.namespace, entry.item.topic)) for entry in entries]
        placed = [(entry, topic) for entry, topic in zip(entries, own_topics, strict=True) if topic is not None]
        topicless = (
            [entry for entry, topic in zip(entries, own_topics, strict=True) if topic is None]
            if len(placed) < len(entries)
            else []
        )
        keyed = [(topic, entry.item.idempotency_key, entry) for entry, topic in placed if entry.item.idempotency_key]
        # In the same order in all sessions, which avoids deadlocks.
        keyed.sort(key=lambda one: (one[0].namespace_id, one[1]))
        (row,) = await fetcher.fetch(
            "topic_enqueue",
            lock_keys({topic.id for _, topic in placed}),
            [topic.id for topic, _, _ in keyed],
            [key for _, key, _ in keyed],
            [entry.id for _, _, entry in keyed],
            [entry.id for entry, _ in placed],
            [topic.id for _, topic in placed],
            [entry.item.priority or 0 for entry, _ in placed],
            [entry.item.deliver_after for entry, _ in placed],
            [entry.item.delay for entry, _ in placed],
            [entry.item.ttl for entry, _ in placed],
            [entry.item.idempotency_key for entry, _ in placed],
            [entry.item.is_json for entry, _ in placed],
            [entry.item.stored_metadata for entry, _ in placed],
            [entry.item.stored_payload for entry, _ in placed],
        )
        new = set(row["ids"] or ())
        left: list[tuple[Entry, Topic]] = []
        for entry, topic in placed:
            if entry.id in new:
                entry.settled = True
                stored.note(entry, topic, row["at"])
            else:
                left.append((entry, topic))
        return topicless + await self._duplicates(fetcher, left)

    async def _duplicates(self, fetcher: Fetcher, left: list[tuple[Entry, Topic]]) -> list[Entry]:
        """Give duplicates the ids of the first; returns those that are none."""
        await self.settle_owned(fetcher, [(entry, topic) for entry, topic in left if entry.item.idempotency_key])
        again = []
        for entry, topic in left:
            if not entry.settled:
                self._catalog.forget(topic.key)
                again.append(entry)
        return again

    async def settle_owned(self, fetcher: Fetcher, keyed: list[tuple[Entry, Topic]]) -> None:
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


class TopicPublisher:
    """Enqueues staged items inside the transaction that publishes them, without a server."""

    def __init__(self, database: Database) -> None:
        catalog = TopicCatalog(database)
        self._quotas = Quotas(database, {})
        self._store = TopicStore(catalog, ItemIds(database, None))

    async def admit(self, items: Sequence[EnqueueItem]) -> None:
        """Count items against the quotas of their namespaces. Raises `QuotaExceeded`."""
        await self._quotas.admit(items)

    async def enqueue_in(self, transaction: Fetcher, entries: Sequence[Entry]) -> Stored:
        return await self._store.store(transaction, entries)

    def settle(self, stored: Stored) -> None:
        """Servers read of it in the change log."""
