"""The catalog: queues, partitions and groups, cached per worker, created on first use."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

import asyncpg

from queen.storage.database import Database, Fetcher, Record
from queen.wire.ids import partition_uuid

QUEUE_MODE = "__QUEUE_MODE__"
_MOST_PARTITIONS = 200_000
_MOST_GROUPS = 50_000


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue and its options, as stored."""

    id: int
    public_id: uuid.UUID
    name: str
    namespace: str
    task: str
    priority: int
    lease_time: int
    retry_limit: int
    retry_delay: int
    max_size: int
    ttl: int | None
    dead_letter_queue: bool
    dlq_after_max_retries: bool
    delayed_processing: int
    window_buffer: int
    retention_seconds: int
    completed_retention_seconds: int
    retention_enabled: bool
    encryption_enabled: bool
    max_wait_time_seconds: int
    dedup_window_seconds: int | None
    created_at: datetime
    paused: bool = False
    paused_groups: frozenset[str] = frozenset()

    @classmethod
    def from_record(cls, record: Record) -> Queue:
        values: dict[str, Any] = {field.name: record[field.name] for field in fields(cls)}
        values["paused_groups"] = frozenset(values["paused_groups"])
        return cls(**values)

    def is_paused_for(self, group: str) -> bool:
        """Whether nothing is delivered to a group for now."""
        return self.paused or group in self.paused_groups

    @property
    def lease_seconds(self) -> int:
        return self.lease_time or 60


class Partition:
    """A partition this worker has met. `known_to` is how far it knows the transaction ids; None: not at all.

    `known_since` is the time from which on it knows them.
    """

    __slots__ = ("id", "known_since", "known_to", "name", "queue_id", "queue_name", "started_empty_at", "uuid")

    def __init__(self, id: int, queue_id: int, queue_name: str, name: str) -> None:
        self.id = id
        self.queue_id = queue_id
        self.queue_name = queue_name
        self.name = name
        self.uuid = partition_uuid(id)
        self.known_to: int | None = None
        self.known_since = 0.0
        self.started_empty_at: float | None = None


class Catalog:
    """Looks names up in memory first, then in PostgreSQL."""

    def __init__(
        self,
        database: Database,
        on_created: Callable[[Sequence[str]], None] = lambda names: None,
        on_partitions: Callable[[str, int], None] = lambda queue, count: None,
    ) -> None:
        self._database = database
        self._on_created = on_created
        self._on_partitions = on_partitions
        self._queues: dict[str, Queue] = {}
        self._queues_by_id: dict[int, Queue] = {}
        self._partitions: dict[tuple[int, str], Partition] = {}
        self._partitions_by_id: dict[int, Partition] = {}
        self._groups: dict[str, int] = {}
        self._changes = 0
        self._group_changes = 0
        self.hits = 0
        self.misses = 0

    @property
    def size(self) -> int:
        """How many queues are remembered."""
        return len(self._queues)

    def cached_queue(self, name: str) -> Queue | None:
        known = self._queues.get(name)
        if known is not None:
            self.hits += 1
        return known

    def cached_partition_in(self, queue: Queue, name: str) -> Partition | None:
        return self._partitions.get((queue.id, name))

    def cached_queue_by_id(self, id: int) -> Queue | None:
        return self._queues_by_id.get(id)

    def cached_partition_by_id(self, id: int) -> Partition | None:
        return self._partitions_by_id.get(id)

    def cached_group(self, name: str) -> int | None:
        return self._groups.get(name)

    async def queue(self, name: str) -> Queue | None:
        known = self._queues.get(name)
        if known is None:
            await self._load_queues([name])
            return self._queues.get(name)
        self.hits += 1
        return known

    async def queue_of(self, partition: Partition) -> Queue | None:
        known = self._queues_by_id.get(partition.queue_id)
        return known if known is not None else await self.queue(partition.queue_name)

    async def all_queues(self) -> list[Queue]:
        """Every queue, fresh from PostgreSQL."""
        return [self.remember_queue(record) for record in await self._read_queues("all_queues")]

    async def ensure_partitions(self, names: Collection[tuple[str, str]]) -> None:
        """Make the queues and partitions that do not exist yet, and remember them all."""
        unknown = sorted({queue for queue, _ in names if queue not in self._queues})
        if unknown:
            await self._load_queues(unknown)
            missing = [name for name in unknown if name not in self._queues]
            if missing:
                spaces, tasks = zip(*(namespace_and_task(name) for name in missing), strict=True)
                await self._database.fetch("create_queues", missing, list(spaces), list(tasks))
                await self._load_queues(missing)
                self._on_created(missing)
        wanted = [(self._queues[queue], name) for queue, name in names if queue in self._queues]
        absent = [(queue, name) for queue, name in wanted if (queue.id, name) not in self._partitions]
        if absent:
            await self._load_partitions(absent)
            absent = [(queue, name) for queue, name in absent if (queue.id, name) not in self._partitions]
        if absent:
            ids, partition_names = [queue.id for queue, _ in absent], [name for _, name in absent]
            try:
                made = await self._database.fetch("create_partitions", ids, partition_names)
            except asyncpg.ForeignKeyViolationError:
                # One of the queues has just been deleted elsewhere: all of them are looked up again.
                for queue, _ in absent:
                    self.forget_queue(queue.name)
                return
            names_by_id = {queue.id: queue.name for queue, _ in absent}
            for queue_id, count in Counter(row["queue_id"] for row in made).items():
                self._on_partitions(names_by_id[queue_id], count)
            await self._load_partitions(absent)

    async def partition(self, queue: Queue, name: str) -> Partition | None:
        known = self._partitions.get((queue.id, name))
        if known is None:
            await self._load_partitions([(queue, name)])
            known = self._partitions.get((queue.id, name))
        return known

    async def partitions_by_id(self, ids: Iterable[int], fetcher: Fetcher | None = None) -> dict[int, Partition]:
        """Partitions by id; what is not remembered is read by `fetcher`, if one is given."""
        wanted = set(ids)
        found = {id: self._partitions_by_id[id] for id in wanted if id in self._partitions_by_id}
        missing = wanted - found.keys()
        if missing:
            for row in await (fetcher or self._database).fetch("partitions_by_ids", list(missing)):
                found[row["id"]] = self._remember_partition(row["id"], row["queue_id"], row["queue_name"], row["name"])
        return found

    async def group(self, name: str) -> int:
        """A group, made if it is new."""
        known = await self.existing_group(name)
        if known is None:
            changes = self._group_changes
            (row,) = await self._database.fetch("create_group", name)
            known = self._remember_group(name, row["id"], changes)
        return known

    async def existing_group(self, name: str) -> int | None:
        known = self._groups.get(name)
        if known is None:
            changes = self._group_changes
            for row in await self._database.fetch("groups_by_names", [name]):
                known = self._remember_group(name, row["id"], changes)
        return known

    async def group_on(self, name: str, partition_ids: Collection[int]) -> int:
        """A group, made if it is new and one of the partitions exists; else 0, which none has."""
        known = await self.existing_group(name)
        if known is None and await self.partitions_by_id(partition_ids):
            known = await self.group(name)
        return known or 0

    def remember_queue(self, record: Record) -> Queue:
        queue = Queue.from_record(record)
        old = self._queues.get(queue.name)
        if old is not None and old.id != queue.id:
            self.forget_queue(queue.name)
        self._queues[queue.name] = queue
        self._queues_by_id[queue.id] = queue
        return queue

    async def stored_queues(self, names: Collection[str]) -> dict[str, Queue]:
        """Queues as they are stored now; what is remembered stays as it is."""
        records = await self._read_queues("queues_by_names", list(names))
        return {record["name"]: Queue.from_record(record) for record in records}

    def known_queues(self) -> set[str]:
        """The names of the queues that are remembered."""
        return set(self._queues)

    def correct(self, stored: Mapping[str, Queue | None]) -> None:
        """Forget what is remembered of these queues where it is not what is stored; None: it does not exist."""
        for name, queue in stored.items():
            known = self._queues.get(name)
            if known is None or known == queue:
                continue
            if queue is None or queue.id != known.id:
                self.forget_queue(name)
            else:
                self.refresh_queue(name)

    def forget_everything(self) -> None:
        self._changes += 1
        self._group_changes += 1
        self._queues.clear()
        self._queues_by_id.clear()
        self._partitions.clear()
        self._partitions_by_id.clear()
        self._groups.clear()

    def forget_queue(self, name: str) -> None:
        """Drop what is known of a queue; it is looked up again when next used."""
        self._changes += 1
        queue = self._queues.pop(name, None)
        if queue is None:
            return
        self._queues_by_id.pop(queue.id, None)
        for key in [key for key in self._partitions if key[0] == queue.id]:
            self.forget_partition(self._partitions[key])

    def refresh_queue(self, name: str) -> None:
        """Have the options of a queue read again, keeping its partitions."""
        self._changes += 1
        queue = self._queues.pop(name, None)
        if queue is None:
            return
        self._queues_by_id.pop(queue.id, None)
        for key, partition in self._partitions.items():
            if key[0] == queue.id:
                # The window may have grown: the ids of the old one are not enough.
                partition.known_to = None

    def forget_partition(self, partition: Partition) -> None:
        self._partitions.pop((partition.queue_id, partition.name), None)
        self._partitions_by_id.pop(partition.id, None)

    def forget_partition_id(self, id: int) -> None:
        partition = self._partitions_by_id.get(id)
        if partition is not None:
            self.forget_partition(partition)

    def forget_group(self, name: str) -> None:
        self._group_changes += 1
        self._groups.pop(name, None)

    async def _load_queues(self, names: list[str]) -> None:
        self.misses += len(names)
        for record in await self._read_queues("queues_by_names", names):
            self.remember_queue(record)

    async def _read_queues(self, statement: str, *args: Any) -> list[Record]:
        while True:
            changes = self._changes
            records = await self._database.fetch(statement, *args)
            # What was read while a change was notified of may be older than that change.
            if changes == self._changes:
                return records

    async def _load_partitions(self, wanted: list[tuple[Queue, str]]) -> None:
        queues = {queue.id: queue for queue, _ in wanted}
        rows = await self._database.fetch(
            "partitions_by_names", [queue.id for queue, _ in wanted], [name for _, name in wanted]
        )
        for row in rows:
            self._remember_partition(row["id"], row["queue_id"], queues[row["queue_id"]].name, row["name"])

    def _remember_group(self, name: str, id: int, changes: int) -> int:
        # Read while a change was notified of, it may have been deleted since, and have another id by now.
        if changes == self._group_changes:
            if len(self._groups) >= _MOST_GROUPS:
                self._groups.clear()
            self._groups[name] = id
        return id

    def _remember_partition(self, id: int, queue_id: int, queue_name: str, name: str) -> Partition:
        known = self._partitions_by_id.get(id)
        if known is not None:
            return known
        if len(self._partitions_by_id) >= _MOST_PARTITIONS:
            self.forget_partition(next(iter(self._partitions_by_id.values())))
        partition = Partition(id, queue_id, queue_name, name)
        self._partitions[queue_id, name] = partition
        self._partitions_by_id[id] = partition
        return partition


def namespace_and_task(queue: str) -> tuple[str, str]:
    """What a queue that was made by its first push gets: `billing.ingest.eu` is task `ingest` of `billing`."""
    namespace, _, rest = queue.partition(".")
    return namespace, rest.partition(".")[0]
