"""The topics and their options, cached per worker; the first enqueue creates a topic."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

from queen.storage.database import Database, Record
from queen.wire.api.resources.topics import TopicOptions

TopicKey: TypeAlias = tuple[str, str]
"""(namespace, topic)"""

LOCKS: Final = 64
"""Topics share this many advisory locks, so that a batch for any number of topics takes few."""

_MOST_TOPICS = 100_000


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic and its options, as stored."""

    id: int
    namespace_id: int
    namespace: str
    name: str
    max_retries: int
    backoff_base_ms: int
    backoff_cap_ms: int
    lease_seconds: int
    at_most_once: bool
    ttl_seconds: int | None
    paused: bool

    @classmethod
    def from_record(cls, record: Record) -> Topic:
        values: dict[str, Any] = {field.name: record[field.name] for field in fields(cls)}
        return cls(**values)

    @property
    def key(self) -> TopicKey:
        return self.namespace, self.name


class TopicCatalog:
    """Looks topics up in memory, then in PostgreSQL."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._topics: dict[TopicKey, Topic] = {}
        self._changes = 0

    @property
    def used(self) -> bool:
        """Whether any topic was used at this worker."""
        return bool(self._topics)

    def cached(self, key: TopicKey) -> Topic | None:
        return self._topics.get(key)

    async def find(self, keys: Collection[TopicKey]) -> dict[TopicKey, Topic]:
        """Those of the topics that exist."""
        unknown = [key for key in keys if key not in self._topics]
        found = await self._load(unknown) if unknown else {}
        return {key: topic for key in keys if (topic := self._topics.get(key) or found.get(key)) is not None}

    async def one(self, key: TopicKey) -> Topic | None:
        return (await self.find([key])).get(key)

    async def ensure(self, keys: Collection[TopicKey]) -> dict[TopicKey, Topic]:
        """All of the topics, created where they do not exist."""
        found = await self.find(keys)
        missing = sorted(key for key in keys if key not in found)
        if missing:
            namespaces, names = [key[0] for key in missing], [key[1] for key in missing]
            await self._database.fetch("topic_create_namespaces", namespaces)
            await self._database.fetch("topic_create", namespaces, names)
            found |= await self._load(missing)
        return found

    def forget(self, key: TopicKey) -> None:
        """The topic was changed or deleted: it is looked up again when next used."""
        self._changes += 1
        self._topics.pop(key, None)

    async def refresh(self) -> None:
        """Reload the cache, as other hosts may have changed topics."""
        keys = list(self._topics)
        if keys:
            there = await self._load(keys)
            for key in keys:
                if key not in there:
                    self.forget(key)

    async def _load(self, keys: Collection[TopicKey]) -> dict[TopicKey, Topic]:
        changes = self._changes
        rows = await self._database.fetch("topics_by_names", [key[0] for key in keys], [key[1] for key in keys])
        topics = {topic.key: topic for topic in map(Topic.from_record, rows)}
        # Read while a change was notified: it may be older than that change, and is not cached.
        if changes == self._changes:
            if len(self._topics) + len(topics) > _MOST_TOPICS:
                self._topics.clear()
            self._topics |= topics
        return topics


def lock_keys(topic_ids: Collection[int]) -> list[int]:
    """The advisory locks of these topics, in the order in which they are always taken."""
    return sorted({id % LOCKS for id in topic_ids})


def topic_options(topic: Topic) -> TopicOptions:
    """The options of a topic, in the order of the parameters of `topic_configure`."""
    return TopicOptions(*(getattr(topic, field) for field in TopicOptions.__struct_fields__))
