"""The spool router: pushes that PostgreSQL cannot store now are spooled, in order, and answered `buffered`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice

import msgspec

from queen.broker.heartbeat import MaintenanceModes
from queen.broker.push.results import join_results
from queen.errors import Overloaded
from queen.log.slices import Chunk, Push, PushSlice, SlicePreparer, Target
from queen.spool.record import UNNUMBERED, Record, bucket_of
from queen.spool.spool import Spool
from queen.storage.database import Availability
from queen.wire.envelope import Envelope
from queen.wire.ids import IdBlock

_SMALL_BACKLOG_BYTES = 1 << 20
_LONGEST_WAIT = 1.0
_POLL = 0.005

_encode = msgspec.json.encode


class SpoolRouter:
    """Decides which pushes go to the spool, and spools them."""

    def __init__(
        self,
        spool: Spool,
        modes: MaintenanceModes,
        availability: Availability,
        preparer: SlicePreparer,
        envelope: Envelope,
    ) -> None:
        self._spool = spool
        self._state = spool.state
        self._modes = modes
        self._availability = availability
        self._preparer = preparer
        self._envelope = envelope

    @property
    def engaged(self) -> bool:
        """Whether any push may have to be spooled. All that a push reads in normal operation."""
        return self._state.engaged or self._modes.push_maintenance or self._availability.down

    def divide(self, pushes: Sequence[Push]) -> tuple[list[Push], list[Push]]:
        """Those that may be stored now, and those that follow spooled messages of one of their partitions.

        Stored in this order, no push overtakes another one to the same partition that came before it.
        """
        if self._closed:
            return [], list(pushes)
        free: list[Push] = []
        behind: list[Push] = []
        taken: set[int] = set()
        for push in pushes:
            buckets = _buckets(push)
            if self._state.holds(buckets) or not taken.isdisjoint(buckets):
                behind.append(push)
                taken |= buckets
            else:
                free.append(push)
        return free, behind

    async def must_spool(self, pushes: Sequence[Push]) -> bool:
        """Whether these pushes have to be spooled, after a wait for the replay of a small backlog.

        They must not overtake spooled messages of the same partition.
        """
        if self._closed:
            return True
        buckets = {bucket for push in pushes for bucket in _buckets(push)}
        give_up = time.monotonic() + _LONGEST_WAIT
        while self._state.holds(buckets):
            if self._closed or self._state.nbytes > _SMALL_BACKLOG_BYTES or time.monotonic() > give_up:
                return True
            self._state.want()
            await asyncio.sleep(_POLL)
        return False

    def spooled(self, targets: Collection[Target]) -> list[Target]:
        """Those of the partitions that have messages in the spool."""
        if not self._state.engaged:
            return []
        found = [target for target in targets if self._state.holds({bucket_of(*target)})]
        if found:
            self._state.want()
        return found

    async def wait_for_replay(self, targets: Collection[Target]) -> None:
        """Before a transaction that pushes: raises `Overloaded` when its messages would overtake spooled ones."""
        if not self._state.engaged or not targets:
            return
        buckets = {bucket_of(*target) for target in targets}
        give_up = time.monotonic() + _LONGEST_WAIT
        while self._state.holds(buckets):
            if time.monotonic() > give_up:
                raise Overloaded(
                    "messages pushed earlier to the same partition are still in the spool,"
                    " and the transaction must not overtake them; nothing was done, retry"
                )
            self._state.want()
            await asyncio.sleep(_POLL)

    async def spool(self, batch: Sequence[Push], *, outage: bool = False) -> Callable[[], None]:
        """Spool a batch; returns a function that answers it. Raises `SpoolRefused`."""
        now = time.time()
        segments = list(self._segments(batch, now))
        held = [push.hold for push in batch if push.hold is not None]
        all_wait = len(held) == len(batch)
        try:
            await self._spool.writer.append(
                [record for records, _ in segments for record in records],
                due_at=now + min(hold.seconds for hold in held) if all_wait else 0.0,
                flush_at=min((hold.messages for hold in held), default=1) if all_wait else 1,
            )
        finally:
            # Not before: while nothing is spooled, the drainer would clear it.
            if outage and not self._state.outage:
                self._state.set_outage(True)
        blocks = {record.block for records, _ in segments for record in records}
        lines: dict[PushSlice, list[bytes]] = {}
        for records, parts in segments:
            lines |= _render(records, parts, blocks)
        return lambda: _answer(batch, lines)

    @property
    def _closed(self) -> bool:
        return self._modes.push_maintenance or self._availability.down or self._state.outage

    def _segments(self, batch: Sequence[Push], now: float) -> Iterator[tuple[list[Record], list[PushSlice]]]:
        """The records of each partition in the batch, and the slices that they are made of."""
        by_target: dict[Target, list[PushSlice]] = {}
        for push in batch:
            for part in push.slices:
                by_target.setdefault(part.target, []).append(part)
        for target, parts in by_target.items():
            tried = list({block for part in parts for block in part.sender.blocks})
            records = [
                Record(UNNUMBERED, now, *target, chunk.block.pack(), chunk.count, tried, self._seal(chunk))
                for chunk in self._chunks(parts)
            ]
            yield records, parts

    def _chunks(self, parts: Sequence[PushSlice]) -> Iterator[Chunk]:
        """Segments: those of an earlier attempt, because messages keep their ids, or new ones."""
        small: list[PushSlice] = []
        for part in parts:
            if part.chunks is None:
                small.append(part)
                continue
            yield from self._join(small)
            small = []
            yield from part.chunks
        yield from self._join(small)

    def _join(self, parts: list[PushSlice]) -> list[Chunk]:
        if not parts:
            return []
        joint = parts[0].joint
        return joint[1] if joint is not None and joint[0] == len(parts) else self._preparer.pack_unplaced(parts)

    def _seal(self, chunk: Chunk) -> bytes:
        """Encrypted if that is possible: whether the queue requires it may not be known now."""
        if self._envelope.is_encrypted(chunk.sealed) or not self._envelope.can_encrypt:
            return chunk.sealed
        return self._envelope.seal(chunk.plain, encrypt=self._envelope.can_encrypt)


def _buckets(push: Push) -> set[int]:
    return {bucket_of(*slice_.target) for slice_ in push.slices}


def _render(records: Sequence[Record], parts: Sequence[PushSlice], spooled: set[bytes]) -> dict[PushSlice, list[bytes]]:
    blocks = [(IdBlock.parse(record.block), record.count) for record in records]
    ids = iter([block.text(index).encode() for block, count in blocks for index in range(count)])
    target = b'"queueName":%b,"queue":%b,"partition":%b}' % (
        _encode(parts[0].target[0]),
        _encode(parts[0].target[0]),
        _encode(parts[0].target[1]),
    )
    lines: dict[PushSlice, list[bytes]] = {}
    for part in parts:
        # An attempt of unknown outcome may have stored them under other ids: then theirs is not known yet.
        sure = part.sender.blocks <= spooled
        lines[part] = [
            b',"transaction_id":%b,"status":"buffered",%b"trace_id":%b,"transactionId":%b,%b'
            % (
                transaction := _encode(item.transaction_id),
                b'"message_id":"%b",' % id if sure else b"",
                _encode(item.trace_id or None),
                transaction,
                target,
            )
            for item, id in zip(part.items, islice(ids, len(part.items)), strict=True)
        ]
    return lines


def _answer(batch: Sequence[Push], lines: dict[PushSlice, list[bytes]]) -> None:
    for push in batch:
        if not push.answer.done():
            push.answer.set_result(push.render(join_results(push.slices, lines, push.count, push.first)))
        push.slices.clear()
