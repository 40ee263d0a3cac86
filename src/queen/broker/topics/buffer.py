"""Buffered enqueues: fsynced in the log of this host, with their ids, and then answered.

Requests that arrive while one fsync runs share the next. What the log holds is stored by the `Flusher`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Final

from queen.broker.topics.batching import RequestBatcher
from queen.errors import BadRequest, Overloaded, RedisUnavailable
from queen.log.topic_store import ItemIds
from queen.metrics.meter import Meter
from queen.redis.interfaces import Copied, Copies
from queen.spool.record import UNNUMBERED, Record, bucket_of
from queen.spool.spool import Spool
from queen.spool.writer import Placed, SpoolRefused
from queen.wire.ids import IdSource
from queen.wire.topic_wal import encode_batch, make_batch
from queen.wire.topics import EnqueueItem

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Names the run of the machine in which `ticks` of its processes can be compared; empty where there is no name."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def ticks() -> float:
    """Seconds by the clock that never steps; every process of the machine sees the same."""
    return time.monotonic()


class ServerTime:
    """Tells what PostgreSQL's clock showed at a moment of the past, steadily: of two moments the later is later."""

    def __init__(self) -> None:
        self._boot = boot_id()
        self._ahead: float | None = None

    @property
    def known(self) -> bool:
        return self._ahead is not None

    def learn(self, at: float, sent: float, received: float) -> None:
        """PostgreSQL said `at`, in seconds since 1970, between two moments in ticks."""
        most = at - sent
        if self._ahead is None or self._ahead < at - received:
            # Its clock was set, or has drifted: there is no use in what was known before.
            self._ahead = most
        else:
            self._ahead = min(self._ahead, most)

    def at(self, boot: str, moment: float, wall: float) -> float:
        """Seconds since 1970 by PostgreSQL's clock; `wall` is the same moment by a clock that may have been set."""
        assert self._ahead is not None
        if boot and boot == self._boot:
            return self._ahead + moment
        # From before the machine was started: only the other clock has gone on.
        return self._ahead + ticks() - max(0.0, time.time() - wall)


log = logging.getLogger(__name__)

_BYTES_PER_RECORD: Final = 1 << 20
_BYTES_PER_ITEM: Final = 512
"""What an item counts for besides its payload, so that a record of small ones has no end of them."""
_SEVERAL: Final = ""
"""Stands, in a record, for the namespaces of requests that name several."""
_LARGEST_COPIED: Final = 64 << 10
_LONGEST_WAIT: Final = 5.0
_POLL: Final = 0.005


@dataclass(slots=True, eq=False)
class Accept:
    """A request whose items are to be made durable; `large`: one of them is too large for others to have a copy."""

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

    requests: list[Accept] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    weight: int = 0

    def add(self, request: Accept, ids: Sequence[int]) -> None:
        self.requests.append(request)
        self.ids += ids
        self.weight += request.nbytes + len(ids) * _BYTES_PER_ITEM


class Buffer:
    """Takes items for PostgreSQL to have a little later."""

    def __init__(
        self,
        wal: Spool,
        ids: ItemIds,
        blocks: IdSource,
        on_written: Callable[[], None],
        meter: Meter,
        copies: Copies | None,
        *,
        most: int,
    ) -> None:
        """`on_written` is told when there is something to flush; `most` items of the host may wait."""
        self._wal = wal
        self._ids = ids
        self._blocks = blocks
        self._on_written = on_written
        self._meter = meter
        self._copies = copies
        self._most = most
        self._boot = boot_id()
        self.lane: RequestBatcher[Accept] = RequestBatcher(
            self._run, weigh=lambda request: len(request.items), limit=5000
        )

    async def enqueue(self, items: Sequence[EnqueueItem]) -> list[int]:
        """Make items durable; gives their ids. Raises `Overloaded` when too many wait: then nothing was kept."""
        if len(items) > self._most:
            raise BadRequest(f"{self._most} items may wait to be stored, and this request has {len(items)}: split it")
        sizes = [len(item.data) + len(item.payload or b"") for item in items]
        large = max(sizes) > _LARGEST_COPIED
        request = Accept(items, sum(sizes), large, asyncio.get_running_loop().create_future())
        self.lane.submit(request)
        return await request.answer

    @property
    def engaged(self) -> bool:
        """Whether anything waits on this host. All that a sync enqueue looks at."""
        return self._wal.board.engaged

    def holds(self, namespaces: Collection[str]) -> bool:
        """Whether items of these namespaces may wait on this host."""
        if not self.engaged or not namespaces:
            return False
        return self._wal.board.holds({bucket_of(namespace, "") for namespace in (_SEVERAL, *namespaces)})

    async def pass_on(self, namespaces: Collection[str]) -> None:
        """Until what waits of these namespaces now is stored. Raises `Overloaded` when that takes too long."""
        newest, give_up = self._wal.board.order, time.monotonic() + _LONGEST_WAIT
        while self.holds(namespaces) and self._wal.board.settled < newest:
            if time.monotonic() > give_up:
                raise Overloaded(
                    "items of the namespace that were enqueued earlier still wait in the buffer to be stored;"
                    " nothing was done, try again soon"
                )
            self._on_written()
            await asyncio.sleep(_POLL)

    async def _run(self, batch: list[Accept]) -> None:
        try:
            await self._write(batch)
        except SpoolRefused:
            if len(batch) == 1:
                self._wal.board.note_refusal()
                raise
            # Together they are too many: some may fit.
            for request in batch:
                await self._run_alone(request)

    async def _run_alone(self, request: Accept) -> None:
        try:
            await self._run([request])
        except SpoolRefused as error:
            if not request.answer.done():
                request.answer.set_exception(error)

    async def _write(self, batch: list[Accept]) -> None:
        ids = await self._ids.take(sum(len(request.items) for request in batch), offline=True)
        rest = iter(ids)
        numbered = [(request, list(islice(rest, len(request.items)))) for request in batch]
        portions = list(_portions(numbered))
        placed = await self._wal.writer.append(list(map(self._record, portions)), due_at=0.0, flush_at=1)
        if self._copies is not None:
            small = [one for one, portion in zip(placed, portions, strict=True) if not portion.requests[0].large]
            await self._copy(self._copies, small)
        for request, own in numbered:
            if not request.answer.done():
                request.answer.set_result(own)
        self._on_written()
        for key, count in Counter((item.namespace, item.topic) for request in batch for item in request.items).items():
            self._meter.topic_items("enqueued", *key, count)

    async def _copy(self, copies: Copies, placed: Sequence[Placed]) -> None:
        """Let other hosts have what this one may not live to store."""
        if not placed:
            return
        try:
            # Records that are written together are in one file.
            copied = [Copied(one.start, one.end, one.body) for one in placed]
            await copies.add(str(placed[0].file_id), copied)
        except RedisUnavailable as error:
            # They are on this host's disk, which is what was promised.
            log.debug("buffered items are not copied: %s", error)

    def _record(self, portion: _Portion) -> Record:
        items = list(chain.from_iterable(request.items for request in portion.requests))
        content = encode_batch(make_batch(self._boot, ticks(), items, portion.ids))
        namespace, block = portion.requests[0].namespace, self._blocks.block(1).pack()
        return Record(UNNUMBERED, time.time(), namespace, "", block, len(items), [], content)


def _portions(numbered: Iterable[tuple[Accept, list[int]]]) -> Iterator[_Portion]:
    """Whole requests in each, so that of one which was not answered all is stored, or nothing."""
    open_ones: dict[tuple[str, bool], _Portion] = {}
    for request, ids in numbered:
        kind = (request.namespace, request.large)
        portion = open_ones.setdefault(kind, _Portion())
        portion.add(request, ids)
        if portion.weight >= _BYTES_PER_RECORD:
            yield open_ones.pop(kind)
    yield from open_ones.values()
