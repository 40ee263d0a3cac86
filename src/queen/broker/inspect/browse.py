"""The status of a message, computed from the cursors of its partition."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple

import msgspec

from queen.broker.inspect.find import MessageFinder
from queen.log.catalog import QUEUE_MODE, Catalog, Partition, Queue
from queen.log.segments import Place, StoredMessage, StoredMessages
from queen.storage.database import Database, Fetcher, Record, can_be_stored
from queen.wire.api.messages.browse import (
    BusStatus,
    ConsumptionMode,
    MessageConsumer,
    MessageInList,
    MessageList,
    MessageQueue,
    MessageStatus,
    MessageView,
)
from queen.wire.envelope import Envelope
from queen.wire.times import iso_millis


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """Where one group stands on a partition: the first offset it has not consumed, and until when it leases more."""

    group: str
    committed: int
    leased_until: datetime | None

    def consumed(self, offset: int) -> bool:
        return offset < self.committed


@dataclass(slots=True)
class Readers:
    """The groups that read a partition; `queue_mode` is the one of consumers that name none."""

    queue_mode: GroupPosition | None = None
    groups: list[GroupPosition] = field(default_factory=list)

    def status(self, offset: int, *, dead: bool) -> MessageStatus:
        """Queue mode decides if it reads the partition; else all groups must have consumed the message."""
        if dead or self.queue_mode is not None or not self.groups:
            return self.queue_status(offset, dead=dead)
        return MessageStatus.COMPLETED if self.consumed_by(offset) == len(self.groups) else MessageStatus.PENDING

    def queue_status(self, offset: int, *, dead: bool) -> MessageStatus:
        """The status as queue mode alone sees it."""
        if dead:
            return MessageStatus.DEAD_LETTER
        if self.queue_mode is None:
            return MessageStatus.PENDING
        if self.queue_mode.consumed(offset):
            return MessageStatus.COMPLETED
        return MessageStatus.PROCESSING if self.queue_mode.leased_until is not None else MessageStatus.PENDING

    def consumed_by(self, offset: int) -> int:
        """How many groups have consumed the message, queue mode not counted."""
        return sum(position.consumed(offset) for position in self.groups)

    def leased_until(self, offset: int) -> datetime | None:
        """When queue mode's lease on the message ends, if there is one."""
        if self.queue_mode is None or self.queue_mode.consumed(offset):
            return None
        return self.queue_mode.leased_until

    @property
    def every(self) -> list[GroupPosition]:
        return [*([self.queue_mode] if self.queue_mode else []), *self.groups]


_MODES: Final[dict[tuple[bool, bool], Literal["none", "queue", "bus", "hybrid"]]] = {
    (False, False): "none",
    (True, False): "queue",
    (False, True): "bus",
    (True, True): "hybrid",
}


def mode(*, queue_mode: bool, groups: int) -> ConsumptionMode:
    """How messages are consumed: without groups (queue), by groups (bus), by both, or not at all."""
    return ConsumptionMode(queue_mode, groups, _MODES[queue_mode, groups > 0])


async def read_positions(fetcher: Fetcher, partition_ids: Collection[int]) -> dict[int, Readers]:
    """Who reads each partition, and how far."""
    readers = {partition_id: Readers() for partition_id in partition_ids}
    for row in await fetcher.fetch("cursors_of", list(readers)):
        position = GroupPosition(row["name"], row["committed"], row["leased_until"])
        if position.group == QUEUE_MODE:
            readers[row["partition_id"]].queue_mode = position
        else:
            readers[row["partition_id"]].groups.append(position)
    return readers


_FIRST_HEADS = 4
_MOST_HEADS = 4096


class _Head(NamedTuple):
    """A segment without its body, sorted as the list is; `offsets` are those listed, newest first."""

    age: float
    partition_id: int
    back: int
    offsets: Sequence[int]


class _Frontier(NamedTuple):
    """How far back a partition has been read: how old what is left of it is at least, and its span of offsets."""

    age: float
    partition_id: int
    first_offset: int
    last_offset: int
    heads: int = _FIRST_HEADS


async def page_of(
    fetcher: Fetcher, spans: Sequence[Record], *, without_dead: bool, limit: int, offset: int
) -> list[Place]:
    """The places of a page, newest first; `spans` are rows of `message_spans`, up to `limit + offset` of them."""
    fronts = [
        _Frontier(-row["newest_at"].timestamp(), row["id"], row["first_offset"], row["last_offset"]) for row in spans
    ]
    if len(fronts) == 1 and not without_dead:
        # Within one partition the list is its offsets backwards: no need to read what is skipped.
        (front,) = fronts
        fronts = [front._replace(last_offset=max(front.first_offset, front.last_offset - offset))]
        offset = 0
    merge = _Merge(fetcher, fronts, without_dead)
    places: list[Place] = []
    while len(places) < limit:
        for head in merge.settled():
            if offset >= len(head.offsets):
                offset -= len(head.offsets)
                continue
            room = limit - len(places)
            places += [(head.partition_id, listed) for listed in head.offsets[offset : offset + room]]
            offset = 0
            if len(places) == limit:
                break
        else:
            if not await merge.read_on():
                break
    return places


class _Merge:
    """Heads of many partitions in one order, read a bounded number at a time."""

    def __init__(self, fetcher: Fetcher, fronts: list[_Frontier], without_dead: bool) -> None:
        self._fetcher = fetcher
        self._without_dead = without_dead
        self._fronts = fronts
        self._heads: list[_Head] = []
        heapq.heapify(self._fronts)

    def settled(self) -> Iterator[_Head]:
        """Take the heads that are newer than anything still unread: they have their final place."""
        while self._heads and (not self._fronts or self._heads[0].age < self._fronts[0].age):
            yield heapq.heappop(self._heads)

    async def read_on(self) -> bool:
        """Read the partitions further back that may hold the newest of what is unread; False when all is read."""
        chosen: list[_Frontier] = []
        room = _MOST_HEADS
        while self._fronts and room > 0:
            chosen.append(heapq.heappop(self._fronts))
            room -= chosen[-1].heads
        if not chosen:
            return False
        rows = await self._fetcher.fetch(
            "newest_segments",
            [front.partition_id for front in chosen],
            [front.first_offset for front in chosen],
            [front.last_offset for front in chosen],
            [front.heads for front in chosen],
            self._without_dead,
        )
        for slot, own in groupby(rows, key=itemgetter("slot")):
            self._add(chosen[slot - 1], list(own))
        return True

    def _add(self, front: _Frontier, rows: list[Record]) -> None:
        """Take in the next heads of a partition, newest first; unless those were the last, it has more."""
        age, last = front.age, front.last_offset
        for row in rows:
            base = row["base_offset"]
            lowest = max(base, front.first_offset)
            offsets: Sequence[int] = range(min(base + row["count"], last) - 1, lowest - 1, -1)
            if row["dead"]:
                dead = set(row["dead"])
                offsets = [listed for listed in offsets if listed not in dead]
            age, last = -row["created_at"].timestamp(), lowest
            heapq.heappush(self._heads, _Head(age, front.partition_id, -base, offsets))
        if len(rows) == front.heads and front.first_offset < last:
            more = min(front.heads * 2, _MOST_HEADS)
            heapq.heappush(self._fronts, _Frontier(age, front.partition_id, front.first_offset, last, more))


_LISTED_BY_DEFAULT = timedelta(hours=1)
_LOOKED_AT: Final = (1000, 20_000, None)
"""How many partitions are examined where not all that match are counted: more as long as a page is not full."""


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Which messages are listed; what is None does not matter, and without `since` only the last hour is."""

    queue: str | None = None
    partition: str | None = None
    namespace: str | None = None
    task: str | None = None
    status: MessageStatus | None = None
    since: datetime | None = None
    before: datetime | None = None
    count: bool = True
    """Whether all that match are counted, or no more than a page takes."""


@dataclass(frozen=True, slots=True)
class _Page:
    places: list[Place]
    total: int
    mode: ConsumptionMode
    counted: bool = True


class MessageBrowser:
    """Shows the messages of one shard."""

    def __init__(self, database: Database, catalog: Catalog, envelope: Envelope, finder: MessageFinder) -> None:
        self._database = database
        self._catalog = catalog
        self._envelope = envelope
        self._finder = finder

    async def page(self, wanted: MessageFilter, limit: int, offset: int, preview: int = 0) -> MessageList:
        """A page of messages, newest first, with so many characters of their payloads.

        `total` counts places: a deleted message keeps its own until retention removes it, unless all is on one page.
        """
        queues = await self._queues(wanted)
        page = await self._choose(wanted, queues, limit, offset)
        messages = await self._describe_all(page.places, queues, preview)
        whole = offset == 0 and page.total <= limit and page.counted
        return MessageList(messages, len(messages) if whole else page.total, limit, offset, page.mode, page.counted)

    async def get(self, partition_id: str, transaction_id: str) -> MessageView:
        """Everything about one message, with its payload."""
        found = await self._finder.find(self._database, partition_id, transaction_id)
        message = self._finder.read(found)
        queue, offset = found.queue, found.offset
        readers = (await read_positions(self._database, [found.partition.id]))[found.partition.id]
        letter = next((letter for letter in found.letters if letter["message_offset"] == offset), None)
        encrypted = found.located.encrypted if found.located else self._envelope.is_encrypted(found.letters[0]["body"])
        how = mode(queue_mode=readers.queue_mode is not None, groups=len(readers.groups))
        how.consumed_by_groups = readers.consumed_by(offset)
        return MessageView(
            **_identify(message, found.partition, queue),
            status=readers.status(offset, dead=letter is not None),
            payload=msgspec.Raw(message.payload),
            is_encrypted=encrypted,
            error_message=letter["error_message"] if letter else None,
            retry_count=letter["retry_count"] if letter else None,
            lease_expires_at=iso_millis(readers.leased_until(offset)),
            queue_config=MessageQueue(
                queue.lease_time, queue.retry_limit, queue.retry_delay, queue.ttl, queue.priority
            ),
            mode=how,
            consumer_groups=[
                MessageConsumer(
                    position.group,
                    position.consumed(offset),
                    None if position.consumed(offset) else iso_millis(position.leased_until),
                )
                for position in readers.every
            ],
        )

    async def _queues(self, wanted: MessageFilter) -> dict[int, Queue]:
        if not all(can_be_stored(name) for name in (wanted.queue, wanted.partition) if name):
            return {}
        if wanted.queue is not None:
            queue = await self._catalog.queue(wanted.queue)
            queues = [queue] if queue is not None else []
        else:
            queues = await self._catalog.all_queues()
        return {
            queue.id: queue
            for queue in queues
            if wanted.namespace in (None, queue.namespace) and wanted.task in (None, queue.task)
        }

    async def _choose(self, wanted: MessageFilter, queues: dict[int, Queue], limit: int, offset: int) -> _Page:
        if not queues:
            return _Page([], 0, mode(queue_mode=False, groups=0))
        queue_mode = await self._catalog.existing_group(QUEUE_MODE) or 0
        since = wanted.since or datetime.now(UTC) - _LISTED_BY_DEFAULT
        if wanted.status is MessageStatus.DEAD_LETTER:
            return await self._choose_dead(wanted, list(queues), since, queue_mode, limit, offset)
        every = not (wanted.queue or wanted.namespace or wanted.task)
        for most in (None,) if wanted.count else _LOOKED_AT:
            rows = await self._database.fetch(
                "message_spans",
                None if every else list(queues),
                wanted.partition,
                since,
                wanted.before,
                wanted.status,
                queue_mode,
                limit + offset,
                most,
            )
            first = rows[0]
            counted = most is None or first["looked_at"] < most
            # Each partition that was examined has a message that is newer than any of the others.
            newer = [row for row in rows if row["id"] is not None and row["newest_at"] >= first["least_at"]]
            if counted or len(newer) >= limit + offset:
                break
        places: list[Place] = []
        if offset < first["total"]:
            without_dead = wanted.status is not None
            places = await page_of(self._database, rows, without_dead=without_dead, limit=limit, offset=offset)
        return _Page(places, first["total"], mode(queue_mode=first["queue_mode"], groups=first["groups"]), counted)

    async def _choose_dead(
        self, wanted: MessageFilter, queue_ids: list[int], since: datetime, queue_mode: int, limit: int, offset: int
    ) -> _Page:
        (modes,) = await self._database.fetch("group_modes", queue_ids, wanted.partition, queue_mode, since)
        rows = await self._database.fetch(
            "dead_messages", queue_ids, wanted.partition, since, wanted.before, limit, offset
        )
        places = [(row["partition_id"], row["message_offset"]) for row in rows if row["partition_id"] is not None]
        return _Page(places, rows[0]["total"], mode(queue_mode=modes["queue_mode"], groups=modes["groups"]))

    async def _describe_all(self, places: list[Place], queues: dict[int, Queue], preview: int) -> list[MessageInList]:
        if not places:
            return []
        partition_ids = {partition_id for partition_id, _ in places}
        stored = await StoredMessages(self._database, self._envelope).read(places, payloads=preview > 0)
        partitions = await self._catalog.partitions_by_id(partition_ids)
        readers = await read_positions(self._database, partition_ids)
        rows = await self._database.fetch("dead_among", [pid for pid, _ in places], [offset for _, offset in places])
        dead = {(row["partition_id"], row["message_offset"]) for row in rows}
        described = []
        for place in places:
            message, partition = stored.get(place), partitions.get(place[0])
            queue = queues.get(partition.queue_id) if partition is not None else None
            if message is not None and partition is not None and queue is not None:
                listed = listed_message(message, partition, queue, place, readers[place[0]], place in dead)
                if preview and message.unreadable is None:
                    listed.preview = _beginning(message.payload, preview)
                described.append(listed)
        return described


def _beginning(payload: bytes, characters: int) -> str:
    # Four bytes a character at most; one that is cut in half goes.
    return payload[: 4 * characters].decode(errors="ignore")[:characters]


def _identify(message: StoredMessage, partition: Partition, queue: Queue) -> dict[str, Any]:
    """The fields that every view of a message has."""
    return {
        "id": message.id,
        "transaction_id": message.transaction_id,
        "partition_id": partition.uuid,
        "queue_path": f"{queue.name}/{partition.name}",
        "queue": queue.name,
        "partition": partition.name,
        "namespace": queue.namespace,
        "task": queue.task,
        "trace_id": message.trace_id,
        "producer_sub": message.producer,
        "created_at": iso_millis(message.created_at),
        "unreadable": message.unreadable if message.unreadable is not None else msgspec.UNSET,
    }


def listed_message(
    message: StoredMessage, partition: Partition, queue: Queue, place: Place, readers: Readers, dead: bool
) -> MessageInList:
    """A message as lists show it."""
    offset = place[1]
    return MessageInList(
        **_identify(message, partition, queue),
        status=readers.status(offset, dead=dead),
        queue_status=readers.queue_status(offset, dead=dead),
        bus_status=BusStatus(readers.consumed_by(offset), len(readers.groups)),
        queue_priority=queue.priority,
        lease_expires_at=iso_millis(readers.leased_until(offset)),
    )
