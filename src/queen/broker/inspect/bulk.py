"""Operations on many messages at once, named one by one or by a filter: delete, retry, dead-letter."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Final

from queen.broker.ack.redrive import Copy, Redriver
from queen.broker.change_log import log_partition_change
from queen.broker.events import Event
from queen.broker.inspect.search import MessageSearch, SearchFilter
from queen.chunks import chunks
from queen.errors import Conflict, NotFound, QueenError
from queen.log.catalog import Catalog, Partition, Queue
from queen.log.segments import Place, StoredMessage, StoredMessages, UnreadableSegment, locate, read_segment
from queen.storage.database import Database, Transaction, can_be_stored, retry_transaction, storable
from queen.wire.api.messages.browse import BulkDone, BulkFailure, MessageRef
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.ids import parse_partition_uuid
from queen.wire.segment import MalformedSegment

_AT_ONCE: Final = 200
"""Messages that go in one transaction."""
_MOST_ERRORS: Final = 10


@dataclass(frozen=True, slots=True)
class Selection:
    """Messages of a queue: those named, or those that pass a filter, from where an earlier call has stopped."""

    queue: str
    refs: Sequence[MessageRef] | None
    filter: SearchFilter
    limit: int
    cursor: str | None = None


@dataclass(slots=True)
class _Chosen:
    """The places of the selected messages, and which of them are dead letters."""

    queue: Queue
    partitions: dict[int, Partition] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    dead: set[Place] = field(default_factory=set)
    names: dict[Place, str] = field(default_factory=dict)
    not_found: int = 0
    scanned: int = 0
    cursor: str | None = None


class _Outcome:
    """Counts what became of messages."""

    def __init__(self, chosen: _Chosen) -> None:
        self._chosen = chosen
        self.done = 0
        self.failed = 0
        self.gone = 0
        self.errors: list[BulkFailure] = []

    def fail(self, places: Sequence[Place], error: QueenError) -> None:
        self.failed += len(places)
        for place in places[: _MOST_ERRORS - len(self.errors)]:
            partition, name = self._chosen.partitions[place[0]], self._chosen.names.get(place, "")
            self.errors.append(BulkFailure(partition.uuid, name, str(error)))

    def answer(self) -> BulkDone:
        chosen = self._chosen
        return BulkDone(
            True,
            chosen.queue.name,
            len(chosen.places),
            self.done,
            chosen.not_found + self.gone,
            self.failed,
            self.errors,
            chosen.scanned,
            chosen.cursor,
        )


class BulkMessages:
    """Changes many messages of one shard."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        envelope: Envelope,
        search: MessageSearch,
        redriver: Redriver,
        publish: Callable[[Sequence[Event]], None],
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._envelope = envelope
        self._search = search
        self._redriver = redriver
        self._publish = publish

    async def count(self, selection: Selection) -> BulkDone:
        """How many messages are meant; nothing is changed."""
        return _Outcome(await self._choose(selection)).answer()

    async def delete(self, selection: Selection) -> BulkDone:
        """Delete messages with their dead letters and traces. Consumers keep what they have leased."""
        chosen = await self._choose(selection)
        outcome = _Outcome(chosen)
        for partition_id, places in _by_partition(chosen.places):
            for some in chunks(places, _AT_ONCE):
                try:
                    delete = partial(self._delete, chosen.partitions[partition_id], chosen.queue, some)
                    outcome.done += await retry_transaction(delete)
                except Conflict as error:
                    outcome.fail(some, error)
        outcome.gone = len(chosen.places) - outcome.done - outcome.failed
        return outcome.answer()

    async def retry(self, selection: Selection) -> BulkDone:
        """Store copies at the ends of the partitions, in the order of the messages; their dead letters are removed."""
        chosen = await self._choose(selection)
        outcome = _Outcome(chosen)
        places = sorted(chosen.places)
        for some in chunks([place for place in places if place in chosen.dead], _AT_ONCE):
            await self._retry_dead(chosen, some, outcome)
        for some in chunks([place for place in places if place not in chosen.dead], _AT_ONCE):
            await self._retry_stored(chosen, some, outcome)
        outcome.gone = len(chosen.places) - outcome.done - outcome.failed
        return outcome.answer()

    async def dead_letter(self, selection: Selection, group: str, error: str) -> BulkDone:
        """Make messages dead letters of a group. Nothing else changes: those that are pending are still delivered."""
        chosen = await self._choose(selection)
        outcome = _Outcome(chosen)
        group_id = await self._catalog.group(group)
        for some in chunks(sorted(chosen.places), _AT_ONCE):
            stored = await StoredMessages(self._database, self._envelope).read(some, payloads=True)
            readable = self._readable(stored, outcome)
            await self._insert(chosen, readable, group_id, error)
            outcome.done += len(readable)
        outcome.gone = len(chosen.places) - outcome.done - outcome.failed
        return outcome.answer()

    async def _choose(self, selection: Selection) -> _Chosen:
        if selection.refs is None:
            searched = await self._search.search(selection.filter, selection.limit, selection.cursor)
            return _Chosen(
                searched.queue,
                {found.partition.id: found.partition for found in searched.found},
                [found.place for found in searched.found],
                {found.place for found in searched.found if found.dead},
                {found.place: found.message.transaction_id or "" for found in searched.found},
                scanned=searched.scanned,
                cursor=searched.cursor,
            )
        queue = await self._catalog.queue(selection.queue) if can_be_stored(selection.queue) else None
        if queue is None:
            raise NotFound("Queue not found")
        return await self._resolve(_Chosen(queue), selection.refs)

    async def _resolve(self, chosen: _Chosen, refs: Iterable[MessageRef]) -> _Chosen:
        """Find the messages that are named. A dead letter is meant before a newer message of the same name."""
        by_partition: dict[int, list[str]] = {}
        for ref in dict.fromkeys((ref.partition_id, ref.transaction_id) for ref in refs):
            partition_id = parse_partition_uuid(ref[0])
            if partition_id is None:
                chosen.not_found += 1
            else:
                by_partition.setdefault(partition_id, []).append(ref[1])
        found = await self._catalog.partitions_by_id(by_partition)
        spans = {row["id"]: row for row in await self._database.fetch("partition_spans", list(by_partition))}
        for partition_id, names in by_partition.items():
            partition, span = found.get(partition_id), spans.get(partition_id)
            if partition is None or span is None or partition.queue_id != chosen.queue.id:
                chosen.not_found += len(names)
                continue
            chosen.partitions[partition_id] = partition
            rows = await self._database.fetch("dead_letter_offsets", partition_id, [storable(name) for name in names])
            letters: dict[str, list[int]] = {}
            for row in rows:
                letters.setdefault(row["transaction_id"], []).append(row["message_offset"])
            others = [name for name in names if storable(name) not in letters]
            located = await locate(self._database, partition_id, others) if others else {}
            for name in names:
                offsets = letters.get(storable(name), [])
                places = [(partition_id, offset) for offset in offsets]
                chosen.dead.update(places)
                if not places and located.get(name, -1) >= span["floor_offset"]:
                    places = [(partition_id, located[name])]
                chosen.not_found += not places
                chosen.places += places
                chosen.names.update(dict.fromkeys(places, name))
        return chosen

    async def _delete(self, partition: Partition, queue: Queue, places: Sequence[Place]) -> int:
        """Delete messages of one partition in a transaction; returns how many there were."""
        offsets = sorted(offset for _, offset in places)
        changes: list[Event] = []
        async with self._database.transaction() as transaction:
            deleted = await self._take_out(transaction, partition, queue, offsets)
            letters = await transaction.fetch("delete_dead_letters_at", partition.id, offsets)
            await transaction.fetch("delete_traces_of", partition.id, offsets)
            if deleted:
                changes.append(await log_partition_change(transaction, partition.queue_id, partition.id))
        self._publish(changes)
        return len(deleted | {row["message_offset"] for row in letters})

    async def _take_out(
        self, transaction: Transaction, partition: Partition, queue: Queue, offsets: Sequence[int]
    ) -> set[int]:
        """Rewrite each segment once without the messages at some offsets; returns those that were there."""
        deleted: set[int] = set()
        left = list(offsets)
        while left:
            rows = await transaction.fetch("lock_segment_of", partition.id, left[0])
            if not rows:
                left.pop(0)
                continue
            try:
                segment = read_segment(self._envelope, rows[0])
            except (EnvelopeError, MalformedSegment) as error:
                raise UnreadableSegment(f"the message cannot be deleted: {error}") from error
            inside = [offset for offset in left if offset < segment.end_offset]
            alive = [offset for offset in inside if not segment.is_deleted(offset - segment.base_offset)]
            if alive:
                encrypt = queue.encryption_enabled or self._envelope.is_encrypted(rows[0]["body"])
                body = segment.without(*(offset - segment.base_offset for offset in alive))
                await transaction.fetch(
                    "rewrite_segment", partition.id, segment.base_offset, self._envelope.seal(body, encrypt=encrypt)
                )
                deleted.update(alive)
            # The first one is passed over where there is a gap: its segment has been removed.
            left = left[max(1, len(inside)) :]
        return deleted

    async def _retry_dead(self, chosen: _Chosen, places: Sequence[Place], outcome: _Outcome) -> None:
        rows = await self._database.fetch(
            "dead_letter_producers", [pid for pid, _ in places], [offset for _, offset in places]
        )
        for producer in dict.fromkeys(row["producer_sub"] for row in rows):
            some = sorted(
                {(row["partition_id"], row["message_offset"]) for row in rows if row["producer_sub"] == producer}
            )
            try:
                redriven, _ = await self._redriver.letters(chosen.queue, some, None)
                outcome.done += len(redriven)
            except Conflict as error:
                outcome.fail(some, error)

    async def _retry_stored(self, chosen: _Chosen, places: Sequence[Place], outcome: _Outcome) -> None:
        stored = await StoredMessages(self._database, self._envelope).read(places, payloads=True)
        readable = self._readable(stored, outcome)
        for producer in dict.fromkeys(message.producer for message in readable.values()):
            some = [place for place in sorted(readable) if readable[place].producer == producer]
            copies = [_copy(chosen.partitions[place[0]], readable[place]) for place in some]
            try:
                outcome.done += len(await self._redriver.messages(chosen.queue, copies, producer))
            except Conflict as error:
                outcome.fail(some, error)

    def _readable(self, stored: dict[Place, StoredMessage], outcome: _Outcome) -> dict[Place, StoredMessage]:
        for place, message in stored.items():
            if message.unreadable is not None:
                outcome.fail([place], UnreadableSegment(f"the message cannot be read: {message.unreadable}"))
        return {place: message for place, message in stored.items() if message.unreadable is None}

    async def _insert(self, chosen: _Chosen, messages: dict[Place, StoredMessage], group_id: int, error: str) -> None:
        if not messages:
            return
        encrypt = chosen.queue.encryption_enabled
        count = len(messages)
        await self._database.fetch(
            "insert_dead_letters",
            [chosen.queue.id] * count,
            [pid for pid, _ in messages],
            [offset for _, offset in messages],
            [group_id] * count,
            [uuid.UUID(message.id) for message in messages.values()],
            [storable(message.transaction_id or "") for message in messages.values()],
            [message.trace_id for message in messages.values()],
            [message.producer for message in messages.values()],
            [self._envelope.seal(message.payload, encrypt=encrypt) for message in messages.values()],
            [storable(error)] * count,
            [0] * count,
            [message.created_at for message in messages.values()],
        )


def _copy(partition: Partition, message: StoredMessage) -> Copy:
    return Copy(partition, message.transaction_id or "", message.payload, message.trace_id, message.created_at)


def _by_partition(places: Iterable[Place]) -> Iterator[tuple[int, list[Place]]]:
    for partition_id, some in groupby(sorted(set(places)), key=lambda place: place[0]):
        yield partition_id, list(some)
