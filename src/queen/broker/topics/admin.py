"""Administration of topics: options, counts, peek, purge, delete, dead letters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from queen.broker.answer_size import Answers, NewSize
from queen.broker.topics.context import OnItemsDue
from queen.broker.topics.settle import find_places
from queen.errors import NotFound
from queen.log.topics import LOCKS, Topic, TopicCatalog, TopicKey, lock_keys, topic_options
from queen.storage.database import Database, Record
from queen.wire.api.resources.topics import ConfiguredTopic, PriorityCounts, TopicCounts, TopicOptions
from queen.wire.options import read_options
from queen.wire.topics.requests import ItemRef


class TopicDeadLetters:
    """Lists, deletes and retries dead letters."""

    def __init__(self, database: Database, catalog: TopicCatalog, on_items_due: OnItemsDue, answers: Answers) -> None:
        self._answers = answers
        self._database = database
        self._catalog = catalog
        self._on_items_due = on_items_due

    async def page(self, key: TopicKey, limit: int, offset: int) -> list[Record]:
        topic = await self._catalog.one(key)
        if topic is None:
            return []
        return await _shown(self._answers, self._database, "topic_dead_letters", topic.id, limit, offset)

    async def delete(self, refs: Sequence[ItemRef]) -> list[bool | None]:
        """Delete dead letters; None for those that do not exist."""
        places = await find_places(self._catalog, refs)
        if not places:
            return [None] * len(refs)
        rows = await self._database.fetch(
            "topic_delete_dead_letters",
            [place.number for place in places],
            [place.topic_id for place in places],
        )
        done = {places[row["slot"] - 1].index for row in rows}
        return [index in done or None for index in range(len(refs))]

    async def retry(self, refs: Sequence[ItemRef]) -> list[bool | None]:
        """Make dead letters ready items again, with no retries counted; None for those that do not exist."""
        places = await find_places(self._catalog, refs)
        if not places:
            return [None] * len(refs)
        rows = await self._database.fetch(
            "topic_retry_dead_letters",
            lock_keys({place.topic_id for place in places}),
            [place.number for place in places],
            [place.topic_id for place in places],
        )
        done = {places[row["slot"] - 1].index for row in rows}
        self._on_items_due([((refs[index].namespace, refs[index].topic), 0.0) for index in sorted(done)])
        return [index in done or None for index in range(len(refs))]


_STEP: Final = 5000


async def _shown(answers: Answers, database: Database, statement: str, *arguments: object) -> list[Record]:
    """The rows of a statement, of whose payloads there may be so many bytes; at least one."""

    async def fetch(new_size: NewSize) -> list[Record]:
        size = new_size()
        rows = await database.fetch(statement, *arguments, size.most)
        return list(itertools.takewhile(lambda row: size.fits(len(row["payload"]) + len(row["metadata"] or b"")), rows))

    return await answers.make(fetch)


class TopicAdmin:
    """Configures, counts, peeks into, purges and deletes topics."""

    def __init__(
        self, database: Database, catalog: TopicCatalog, on_changed: Callable[[TopicKey], None], answers: Answers
    ) -> None:
        """`on_changed` notifies this and every other worker."""
        self._answers = answers
        self._database = database
        self._catalog = catalog
        self._on_changed = on_changed

    async def configure(self, key: TopicKey, options: Mapping[str, object] | None) -> ConfiguredTopic:
        """Set the given options, create the topic if it does not exist; returns all options."""
        topic = await self._catalog.one(key)
        current = topic_options(topic) if topic is not None else None
        values = msgspec.structs.astuple(read_options(TopicOptions, options, current))
        if topic is None:
            topic = (await self._catalog.ensure([key]))[key]
        for record in await self._database.fetch("topic_configure", topic.id, *values):
            topic = Topic.from_record(record)
        self._on_changed(key)
        return ConfiguredTopic(topic.namespace, topic.name, topic_options(topic))

    async def pause(self, key: TopicKey, paused: bool) -> bool:
        """Stop delivering items of a topic, or go on; returns whether that is a change. Enqueues are not affected."""
        topic = await self._catalog.one(key)
        if topic is None:
            raise NotFound("Topic not found")
        changed = bool(await self._database.fetch("topic_pause", topic.id, paused))
        if changed:
            self._on_changed(key)
        return changed

    async def active(self, namespace: str) -> list[str]:
        """The names of the topics of a namespace that have ready or leased items."""
        return [row["name"] for row in await self._database.fetch("topic_active", namespace)]

    async def counts(
        self, namespace: str, name: str | None, search: str = "", limit: int | None = None, offset: int = 0
    ) -> list[TopicCounts]:
        """Item counts and options of the topics of a namespace, or of one of them, by name."""
        rows = await self._database.fetch("topic_counts", namespace, name, search, limit, offset)
        return [
            TopicCounts(
                row["namespace"],
                row["name"],
                row["ready"],
                row["delayed"],
                row["leased"],
                row["dead"],
                topic_options(Topic.from_record(row)),
                row["paused"],
            )
            for row in rows
        ]

    async def priorities(self, key: TopicKey, limit: int) -> list[PriorityCounts]:
        """Item counts of a topic by priority, in the order of service."""
        topic = await self._catalog.one(key)
        if topic is None:
            return []
        rows = await self._database.fetch("topic_priorities", topic.id, limit)
        return [PriorityCounts(row["priority"], row["ready"], row["delayed"], row["leased"]) for row in rows]

    async def peek(self, key: TopicKey, limit: int, offset: int, *, delayed: bool, leased: bool) -> list[Record]:
        """Items in the order of service, with `delayed` also those not due yet; or those that are leased."""
        topic = await self._catalog.one(key)
        if topic is None:
            return []
        if leased:
            return await _shown(self._answers, self._database, "topic_peek_leased", topic.id, limit, offset)
        return await _shown(self._answers, self._database, "topic_peek", topic.id, limit, delayed, offset)

    async def purge(self, key: TopicKey, *, leased: bool = True) -> int:
        """Remove all items of a topic, or those that are not leased; dead letters and options stay. Gives how many."""
        topic = await self._catalog.one(key)
        return await self.remove_items(topic, leased=leased) if topic is not None else 0

    async def remove_items(self, topic: Topic, *, leased: bool) -> int:
        removed = 0
        for statement in ("topic_remove_items", "topic_remove_leased_items") if leased else ("topic_remove_items",):
            while some := len(await self._database.fetch(statement, topic.id, _STEP)):
                removed += some
        return removed

    async def delete(self, key: TopicKey) -> bool:
        """Delete a topic with its items and dead letters; False when it does not exist."""
        topic = await self._catalog.one(key)
        if topic is None:
            return False
        await self.purge(key)
        async with self._database.transaction() as transaction:
            await transaction.fetch("topic_lock_alone", topic.id % LOCKS)
            dropped = await transaction.fetch("topic_drop", topic.id)
        self._on_changed(key)
        return bool(dropped)
