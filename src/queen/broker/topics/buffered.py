"""Write modes of namespaces, and the `buffered` one: items are fsynced in the log of the host, answered, stored later.

Requests that arrive during one fsync share the next. The log is a spool; its drainer stores the records as items.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, TypeAlias

import asyncpg
import msgspec

from queen.broker.topics.batching import RequestBatcher
from queen.broker.topics.context import OnItemsDue
from queen.broker.topics.enqueue import Enqueuer
from queen.errors import BadRequest, DatabaseUnavailable, Overloaded
from queen.log.quotas import Quotas
from queen.log.topic_store import ItemIds
from queen.log.topics import TopicCatalog, TopicKey, lock_keys
from queen.metrics.meter import Meter
from queen.spool.drainer import PositionMoved, RecordsRefused, Span, advance, forward_refused
from queen.spool.quarantine import FailedRecords
from queen.spool.record import UNNUMBERED, Record, bucket_of
from queen.spool.spool import Spool
from queen.spool.writer import Placed, SpoolRefused
from queen.storage.database import Database, TransactionConflict, retry_transaction
from queen.wire.ids import IdSource
from queen.wire.topics.requests import EnqueueItem
from queen.wire.topics.wal import WalBatch, WalItem, decode_batch, encode_batch, make_batch

log = logging.getLogger(__name__)

SYNC: Final = "sync"
BUFFERED: Final = "buffered"


class WriteModes:
    """The write mode of each namespace; one that was set by `set` overrides the settings."""

    def __init__(self, database: Database, configured: Mapping[str, str]) -> None:
        self._database = database
        self._configured = dict(configured)
        self._stored: dict[str, str] = {}
        self.buffered: frozenset[str] = frozenset()
        self._loaded = False
        self._changes = 0
        self._update()

    async def load(self) -> None:
        """Read the modes if they have changed. While PostgreSQL is unavailable the last known ones hold."""
        if self._loaded:
            return
        try:
            await self.refresh()
        except DatabaseUnavailable as error:
            log.debug("write modes of namespaces not refreshed: %s", error)

    def takes(self, items: Sequence[EnqueueItem]) -> bool:
        """Whether a request is buffered, as a whole.

        An item with an idempotency key is not: only PostgreSQL can say whether the key is new.
        """
        buffered = self.buffered
        return bool(buffered) and all(item.namespace in buffered and item.idempotency_key is None for item in items)

    def of(self, namespace: str) -> str:
        return BUFFERED if namespace in self.buffered else SYNC

    async def set(self, namespace: str, mode: str | None) -> None:
        """Set the mode of a namespace; None: as in the settings."""
        await self._database.fetch("topic_set_mode", namespace, mode)
        await self.refresh()

    async def refresh(self) -> None:
        changes = self._changes
        rows = await self._database.fetch("topic_modes")
        self._stored = {row["name"]: row["write_mode"] for row in rows}
        # A change that was notified meanwhile may not have been read.
        self._loaded = changes == self._changes
        self._update()

    def forget(self) -> None:
        """A mode was changed: they are read again when next needed."""
        self._changes += 1
        self._loaded = False

    def all(self) -> dict[str, str]:
        """Every namespace with a mode of its own, stored or configured."""
        return dict(sorted((self._configured | self._stored).items()))

    def _update(self) -> None:
        modes = self._configured | self._stored
        self.buffered = frozenset(namespace for namespace, mode in modes.items() if mode == BUFFERED)


class TopicWriter:
    """Enqueues by the write mode of the namespaces. A request is stored or buffered as a whole."""

    def __init__(self, modes: WriteModes, quotas: Quotas, enqueuer: Enqueuer, buffer: TopicBuffer) -> None:
        self._modes = modes
        self._quotas = quotas
        self._enqueuer = enqueuer
        self._buffer = buffer

    async def enqueue(self, items: Sequence[EnqueueItem]) -> list[int]:
        """Accept items; returns their ids in order, for a duplicate key that of the first item with it."""
        await self._modes.load()
        if self._modes.takes(items):
            await self._quotas.admit(items)
            return await self._buffer.enqueue(items)
        if self._buffer.engaged:
            await self.await_drained({item.namespace for item in items})
        return await self._enqueuer.enqueue(items)

    async def await_drained(self, namespaces: Collection[str]) -> None:
        """Wait for what was buffered before these namespaces became `sync`, so that it is not overtaken."""
        await self._buffer.await_drained([one for one in namespaces if one not in self._modes.buffered])


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Identifies the run of the machine within which `ticks` are comparable; empty where that is unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def ticks() -> float:
    """Seconds by the monotonic clock, the same in every process of the machine."""
    return time.monotonic()


class ServerTime:
    """What PostgreSQL's clock showed at a past moment, monotonically."""

    def __init__(self) -> None:
        self._boot = boot_id()
        self._ahead: float | None = None

    @property
    def known(self) -> bool:
        return self._ahead is not None

    def learn(self, at: float, sent: float, received: float) -> None:
        """PostgreSQL answered `at`, in seconds since 1970, between two times in ticks."""
        most = at - sent
        if self._ahead is None or self._ahead < at - received:
            # Its clock was set, or has drifted: earlier observations are void.
            self._ahead = most
        else:
            self._ahead = min(self._ahead, most)

    def at(self, boot: str, moment: float, wall: float) -> float:
        """Seconds since 1970 by PostgreSQL's clock; `wall` is the same moment by the wall clock, which may be set."""
        assert self._ahead is not None
        if boot and boot == self._boot:
            return self._ahead + moment
        # From before the machine was started: only the wall clock has gone on.
        return self._ahead + ticks() - max(0.0, time.time() - wall)


_BYTES_PER_RECORD: Final = 1 << 20
_BYTES_PER_ITEM: Final = 512
"""What an item counts for besides its payload, so that a record holds a limited number of small ones."""
_SEVERAL: Final = ""
"""The namespace of a record whose requests name several."""
_LARGEST_COPIED: Final = 64 << 10
_LONGEST_WAIT: Final = 5.0
_POLL_SECONDS: Final = 0.005


@dataclass(slots=True, eq=False)
class BufferRequest:
    """Items to be made durable; `large`: one of them is too large to be copied to Redis."""

    items: Sequence[EnqueueItem]
    nbytes: int
    large: bool
    answer: asyncio.Future[list[int]]

    @property
    def namespace(self) -> str:
        first = self.items[0].namespace
        return first if all(item.namespace == first for item in self.items) else _SEVERAL


@dataclass(slots=True)
class _Portion:
    """Requests that become one record."""

    requests: list[BufferRequest] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    weight: int = 0

    def add(self, request: BufferRequest, ids: Sequence[int]) -> None:
        self.requests.append(request)
        self.ids += ids
        self.weight += request.nbytes + len(ids) * _BYTES_PER_ITEM


class TopicBuffer:
    """Makes items durable in the log of this host."""

    def __init__(
        self, wal: Spool, ids: ItemIds, blocks: IdSource, on_written: Callable[[], None], meter: Meter, *, most: int
    ) -> None:
        """`on_written` wakes the drainer; at most `most` items of the host may wait."""
        self._wal = wal
        self._ids = ids
        self._blocks = blocks
        self._on_written = on_written
        self._meter = meter
        self._most = most
        self._boot = boot_id()
        self.copy: Callable[[Sequence[Placed]], Awaitable[None]] | None = None
        """Copies records, except those with large items, before they are answered."""
        self.batcher: RequestBatcher[BufferRequest] = RequestBatcher(
            self._run, weigh=lambda request: len(request.items), limit=5000
        )

    async def enqueue(self, items: Sequence[EnqueueItem]) -> list[int]:
        """Make items durable; returns their ids. Raises `Overloaded` when too many wait: then none was kept."""
        if len(items) > self._most:
            raise BadRequest(
                f"at most {self._most} items may wait to be stored, this request has {len(items)}: split it"
            )
        sizes = [len(item.data) + len(item.payload or b"") for item in items]
        large = max(sizes) > _LARGEST_COPIED
        request = BufferRequest(items, sum(sizes), large, asyncio.get_running_loop().create_future())
        self.batcher.submit(request)
        return await request.answer

    @property
    def engaged(self) -> bool:
        """Whether anything waits on this host. All that a sync enqueue reads."""
        return self._wal.state.engaged

    def holds(self, namespaces: Collection[str]) -> bool:
        """Whether items of these namespaces may wait on this host."""
        if not self.engaged or not namespaces:
            return False
        return self._wal.state.holds({bucket_of(namespace, "") for namespace in (_SEVERAL, *namespaces)})

    async def await_drained(self, namespaces: Collection[str]) -> None:
        """Until what waits of these namespaces now is stored. Raises `Overloaded` when that takes too long."""
        newest, deadline = self._wal.state.order, time.monotonic() + _LONGEST_WAIT
        while self.holds(namespaces) and self._wal.state.settled < newest:
            if time.monotonic() > deadline:
                raise Overloaded("items enqueued earlier in the namespace are still buffered; nothing was done, retry")
            self._on_written()
            await asyncio.sleep(_POLL_SECONDS)

    async def _run(self, batch: list[BufferRequest]) -> None:
        try:
            await self._write(batch)
        except SpoolRefused:
            if len(batch) == 1:
                self._wal.state.note_refusal()
                raise
            # Together they are too many: some may fit.
            for request in batch:
                try:
                    await self._run([request])
                except SpoolRefused as error:
                    if not request.answer.done():
                        request.answer.set_exception(error)

    async def _write(self, batch: list[BufferRequest]) -> None:
        ids = await self._ids.take(sum(len(request.items) for request in batch), offline=True)
        rest = iter(ids)
        numbered = [(request, list(islice(rest, len(request.items)))) for request in batch]
        portions = list(_portions(numbered))
        placed = await self._wal.writer.append(list(map(self._record, portions)), due_at=0.0, flush_at=1)
        if self.copy is not None:
            await self.copy([one for one, some in zip(placed, portions, strict=True) if not some.requests[0].large])
        for request, own in numbered:
            if not request.answer.done():
                request.answer.set_result(own)
        self._on_written()
        for key, count in Counter((item.namespace, item.topic) for request in batch for item in request.items).items():
            self._meter.topic_items("enqueued", *key, count)

    def _record(self, portion: _Portion) -> Record:
        items = list(chain.from_iterable(request.items for request in portion.requests))
        content = encode_batch(make_batch(self._boot, ticks(), items, portion.ids))
        namespace, block = portion.requests[0].namespace, self._blocks.block(1).pack()
        return Record(UNNUMBERED, time.time(), namespace, "", block, len(items), [], content)


def _portions(numbered: Iterable[tuple[BufferRequest, list[int]]]) -> Iterator[_Portion]:
    """Whole requests in each, so that an unanswered one is stored as a whole or not at all."""
    open_ones: dict[tuple[str, bool], _Portion] = {}
    for request, ids in numbered:
        kind = (request.namespace, request.large)
        portion = open_ones.setdefault(kind, _Portion())
        portion.add(request, ids)
        if portion.weight >= _BYTES_PER_RECORD:
            yield open_ones.pop(kind)
    yield from open_ones.values()


SendOn: TypeAlias = Callable[[TopicKey, Record], Awaitable[bool]]
"""Called with a topic and a record of one item of it; whether that is stored on another shard now."""

_EXCERPTS: Final = uuid.UUID("5175656e-0000-4000-8000-746f70696373")
"""The namespace of the UUIDs that name records of single items."""


class _TopicGone(Overloaded, TransactionConflict):
    """A topic was deleted since it was looked up; nothing was stored."""


class TopicRecords:
    """Stores records of the log as items. One call at a time: it has a connection of its own."""

    def __init__(
        self, database: Database, catalog: TopicCatalog, failed: FailedRecords, on_items_due: OnItemsDue
    ) -> None:
        """`failed` quarantines items that PostgreSQL refuses."""
        self._link = database.link()
        self._catalog = catalog
        self._failed = failed
        self._on_items_due = on_items_due
        self._time = ServerTime()
        self.send_on: SendOn | None = None
        """With several shards: stores an item on the shard that its topic has moved to."""

    async def store(self, spans: Sequence[Span], records: Sequence[Record]) -> None:
        batches = [_Batch(record) for record in records]

        async def attempt() -> dict[TopicKey, float]:
            async with self._link.transaction():
                await advance(self._link, spans)
                return await self._store_items([(batch, batch.items) for batch in batches])

        await self._read_clock()
        try:
            due = await retry_transaction(attempt)
        except asyncpg.PostgresError as error:
            raise RecordsRefused(str(error)) from error
        self._on_items_due(list(due.items()))

    async def divert(self, span: Span, record: Record, error: RecordsRefused) -> None:
        """Find the refused items in halves; store the others in one transaction."""
        if isinstance(error, _Unreadable):
            await asyncio.to_thread(self._failed.add, record, str(error))
            await advance(self._link, [span])
            return
        batch = _Batch(record)

        async def attempt() -> dict[TopicKey, float]:
            async with self._link.transaction():
                await advance(self._link, [span])
                return await self._store_halves(batch)

        self._on_items_due(list((await retry_transaction(attempt)).items()))

    async def forward(self, record: Record, error: RecordsRefused) -> bool:
        """Whether a quarantined record, of one item, is in PostgreSQL all the same, here or on another shard."""
        cause, send_on = error.__cause__, self.send_on
        if not isinstance(cause, asyncpg.PostgresError):
            return False
        batch = _Batch(record)
        if len(batch.items) > 1:
            return False
        if isinstance(cause, asyncpg.UniqueViolationError):
            # Stored before its file was put back, or from a copy.
            return True
        if send_on is None:
            return False
        key = batch.topics[batch.items[0].topic]
        return await forward_refused(lambda: send_on(key, record), cause, f"topic {key[0]}/{key[1]}")

    def order_key(self, record: Record) -> Hashable:
        return record.block

    def announce(self, records: Sequence[Record]) -> None:
        self._on_items_due([(key, 0.0) for key in {key for record in records for key in _Batch(record).topics}])

    async def store_once(self, record: Record) -> None:
        """Store a record of one item that is in no file of this log, however often it is sent."""
        try:
            await self.store([Span(uuid.UUID(bytes=record.block), 0, 1)], [record])
        except PositionMoved:
            log.debug("item %s was stored before", uuid.UUID(bytes=record.block))

    async def _store_halves(self, batch: _Batch) -> dict[TopicKey, float]:
        due: dict[TopicKey, float] = {}
        refused: list[tuple[Record, str]] = []
        waiting = [batch.items]
        while waiting:
            some = waiting.pop()
            try:
                async with self._link.transaction():
                    for key, seconds in (await self._store_items([(batch, some)])).items():
                        due[key] = min(seconds, due.get(key, seconds))
            except asyncpg.PostgresError as error:
                if len(some) > 1:
                    middle = len(some) // 2
                    waiting += [some[middle:], some[:middle]]
                    continue
                alone, reason = batch.excerpt(some[0]), RecordsRefused(str(error))
                reason.__cause__ = error
                if not await self.forward(alone, reason):
                    refused.append((alone, str(error)))
        # Before the commit: after a crash in between they are quarantined again, under the same names.
        for alone, text in refused:
            await asyncio.to_thread(self._failed.add, alone, text)
        return due

    async def _read_clock(self) -> None:
        if self._time.known:
            return
        # Twice: the first may include connecting, which makes it inexact.
        for _ in range(2):
            sent = ticks()
            (row,) = await self._link.fetch("topic_clock")
            self._time.learn(row["at"], sent, ticks())

    async def _store_items(self, parts: Sequence[tuple[_Batch, Sequence[WalItem]]]) -> dict[TopicKey, float]:
        """Store items of batches; returns in how many seconds the first of each topic is due."""
        keys = {batch.topics[place] for batch, some in parts for place in {item.topic for item in some}}
        topics = await self._catalog.ensure(keys)
        if len(topics) < len(keys):
            raise _TopicGone(_GONE)
        ids = {topic.id for topic in topics.values()}
        topic_ids = [[topics[key].id if key in topics else 0 for key in batch.topics] for batch, _ in parts]
        accepted = [batch.accepted(self._time) for batch, _ in parts]
        items = [item for _, some in parts for item in some]
        sent = ticks()
        (row,) = await self._link.fetch(
            "topic_flush",
            lock_keys(ids),
            list(ids),
            accepted,
            [item.id for item in items],
            [own[item.topic] for own, (_, some) in zip(topic_ids, parts, strict=True) for item in some],
            [item.priority for item in items],
            _column([item.deliver_after for item in items]),
            _column([item.delay for item in items]),
            _column([item.ttl for item in items]),
            [place for place, (_, some) in enumerate(parts, 1) for _ in some],
            [item.is_json for item in items],
            _column([item.metadata for item in items]),
            [item.payload for item in items],
        )
        self._time.learn(row["at"], sent, ticks())
        if not row["there"]:
            for key in topics:
                self._catalog.forget(key)
            raise _TopicGone(_GONE)
        due: dict[TopicKey, float] = {}
        for at, (batch, some) in zip(accepted, parts, strict=True):
            for item in some:
                key, seconds = batch.topics[item.topic], _seconds_until_due(item, at, row["at"])
                if seconds < due.get(key, math.inf):
                    due[key] = seconds
        return due


_GONE: Final = "topics are deleted while items are stored in them; nothing was stored"


class _Unreadable(RecordsRefused):
    """A record that this version cannot decode."""


class _Batch:
    """A decoded record of the log. Raises `_Unreadable`."""

    __slots__ = ("_content", "_record", "items", "topics")

    def __init__(self, record: Record) -> None:
        self._record = record
        try:
            self._content: WalBatch = decode_batch(record.sealed)
        except msgspec.DecodeError as error:
            raise _Unreadable(f"the record cannot be decoded by this version: {error}") from error
        self.items = self._content.items
        self.topics: list[TopicKey] = self._content.topics

    def accepted(self, time: ServerTime) -> float:
        return time.at(self._content.boot, self._content.ticks, self._record.at)

    def excerpt(self, item: WalItem) -> Record:
        """A record of one of the items, always with the same name."""
        content = encode_batch(msgspec.structs.replace(self._content, items=[item]))
        name = uuid.uuid5(_EXCERPTS, str(item.id))
        return msgspec.structs.replace(self._record, block=name.bytes, count=1, sealed=content)


def _column(values: list[Any]) -> list[Any]:
    """A column of a statement; empty instead of all nulls, which PostgreSQL adds itself."""
    return values if any(value is not None for value in values) else []


def _seconds_until_due(item: WalItem, accepted: float, now: float) -> float:
    if item.deliver_after is None and item.delay is None:
        return 0.0
    due = item.deliver_after.timestamp() if item.deliver_after is not None else accepted + (item.delay or 0.0)
    return max(0.0, due - now)
