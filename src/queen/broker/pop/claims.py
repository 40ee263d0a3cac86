"""Claims: leasing the spans that pops were matched with, and rendering what is in them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from queen.broker.ack.leases import Lease, LeaseBook
from queen.broker.events import held, taken
from queen.broker.notifications import Notifications
from queen.broker.pop.lanes import Lane
from queen.broker.pop.requests import Pop
from queen.errors import Conflict, QueenError
from queen.log.catalog import Catalog, Partition, Queue
from queen.log.segments import SegmentCache, read_segment
from queen.metrics.meter import Meter, clock
from queen.storage.database import Database, Record
from queen.wire.binary.pop import Delivered, encode_frames
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.ids import IdSource
from queen.wire.segment import MalformedSegment, Segment

_NO_STOP = (1 << 63) - 1
_ALL = 1 << 62
_CONFLATED_AT_ONCE = 32
_UNREADABLE_PAUSE = 1.0
DEFAULT_MOST_BYTES = 16 << 20
_MESSAGE_BYTES = 300
"""What a message takes in an answer beside its payload, more or less."""

_encode = msgspec.json.encode


@dataclass(slots=True, eq=False)
class Claim:
    """One partition that one pop (or, consuming at once, several) was matched with, and what came of it."""

    lane: Lane
    partition_id: int
    want: int
    """Messages at most."""
    pops: list[Pop]
    lease_id: str
    """Empty: what is delivered is consumed at once."""
    start: int = 0
    end: int = 0
    """The span of offsets that was leased is [start, end); an end of 0: nothing was."""
    left: int = 0
    """Messages of the partition behind it."""
    hold_for: float = 0.0
    """Seconds for which nothing else of the partition can be had."""
    not_due: bool = False
    """The messages are not due yet (`delayedProcessing`, `windowBuffer`); no lease keeps them."""
    segments: list[Segment] = field(default_factory=list)
    attempts: int = 0
    error: QueenError | None = None
    gone: bool = False
    """The partition does not exist any more."""
    cut_from: int = 0
    """Where it ended before it was cut to what fits in an answer; 0: it was not."""
    unread: bool = False
    """Nothing of it fits: it is given back, and its pops come first with the next claims."""

    @property
    def auto_ack(self) -> bool:
        return not self.lease_id


class UnreadableMessage(Conflict):
    """A stored message cannot be read; it stays where it is."""


class Claimer:
    """Runs claims against one shard and answers the pops they serve."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        cache: SegmentCache,
        leases: LeaseBook,
        envelope: Envelope,
        ids: IdSource,
        notifications: Notifications,
        meter: Meter,
        most_bytes: int = DEFAULT_MOST_BYTES,
    ) -> None:
        """`most_bytes` is what the claims of one run read, and so the most that an answer has, unless one segment has
        more by itself: a message is never cut."""
        self._most_bytes = most_bytes
        self._room = most_bytes
        self._link = database.link()
        self._catalog = catalog
        self._cache = cache
        self._leases = leases
        self._envelope = envelope
        self._ids = ids
        self._notifications = notifications
        self._meter = meter
        self._cache_version = 0
        self.batches = 0

    def lease_id(self, partition_id: int, *, several: bool) -> str:
        return self._ids.lease(partition_id, several=several)

    async def run(self, claims: list[Claim]) -> None:
        """Lease, read, and answer. Afterwards each claim says what is left and for how long it is held."""
        self.batches += 1
        self._meter.pop_batches.observe(len(claims))
        now = clock()
        for claim in claims:
            if claim.lane.conflates:
                claim.want = _ALL
            for pop in claim.pops:
                if pop.request.wait:
                    # How long it waited for a message to be there says nothing of how fast it is served.
                    pop.began = now
        claims.sort(key=_lock_order)
        self._room = self._most_bytes
        self._cache_version = self._cache.version
        queues = {claim.lane.queue_name: await self._queue(claim.lane) for claim in claims}
        # Before anything is leased: a queue that moves to another shard then is unknown here.
        partitions = await self._catalog.partitions_by_id([claim.partition_id for claim in claims], self._link)
        met: list[Claim] = []
        new: list[Claim] = []
        for claim in claims:
            (met if claim.partition_id in claim.lane.cursors else new).append(claim)
        if new:
            met = sorted([*met, *await self._lease_fresh(new, queues)], key=_lock_order)
        if met:
            await self._expire(met, queues)
            stops = await self._stops(met, queues)
            await self._conflate([claim for claim in met if claim.lane.conflates], stops)
            await self._read(met, await self._lease(met, queues, stops))
        await self._give_back([claim for claim in claims if claim.error is not None or claim.unread])
        await self._give_back_rest([claim for claim in claims if claim.cut_from])
        await self._explain([claim for claim in claims if claim.end == 0], queues)
        served = [claim for claim in claims if claim.end > 0 and claim.error is None and not claim.unread]
        await self._deliver(served, partitions)

    async def _queue(self, lane: Lane) -> Queue | None:
        return self._catalog.cached_queue(lane.queue_name) or await self._catalog.queue(lane.queue_name)

    async def _lease_fresh(self, claims: list[Claim], queues: dict[str, Queue | None]) -> list[Claim]:
        """Claim where the group has no cursor that this worker knows of; returns those to be claimed as usual."""
        plain = [claim for claim in claims if claim.lane.plain and _is_plain(queues[claim.lane.queue_name])]
        rows: list[Record] = []
        if plain:
            rows = await self._link.fetch(
                "claim_fresh", *self._columns(plain, queues), *self._spans(plain), self._most_bytes
            )
        places = {(claim.partition_id, claim.lane.group_id): claim for claim in plain}
        by_claim: dict[Claim, list[Record]] = {}
        for row in rows:
            by_claim.setdefault(places[row["partition_id"], row["group_id"]], []).append(row)
        for claim, own in by_claim.items():
            await self._take(claim, own)
        rest = [claim for claim in claims if claim not in by_claim]
        if rest:
            await self._link.fetch(
                "ensure_cursors", [claim.partition_id for claim in rest], [claim.lane.group_id for claim in rest]
            )
        for claim in claims:
            claim.lane.note_cursor(claim.partition_id)
        return rest

    def _columns(self, claims: list[Claim], queues: dict[str, Queue | None]) -> tuple[list[object], ...]:
        """The columns that both claim statements take of each claim."""
        options = [queues[claim.lane.queue_name] for claim in claims]
        return (
            [claim.partition_id for claim in claims],
            [claim.lane.group_id for claim in claims],
            [claim.want for claim in claims],
            [claim.lease_id or None for claim in claims],
            [_lease_seconds(claim, queue) for claim, queue in zip(claims, options, strict=True)],
            [claim.auto_ack for claim in claims],
            [float(queue.window_buffer) if queue else 0.0 for queue in options],
        )

    def _spans(self, claims: list[Claim]) -> tuple[list[object], list[object]]:
        """Where what this worker holds in memory of each claim's partition begins and ends."""
        spans = [self._cache.span(claim.partition_id) for claim in claims]
        return [span[0] for span in spans], [span[1] for span in spans]

    async def _expire(self, claims: list[Claim], queues: dict[str, Queue | None]) -> None:
        ageing = {
            claim.partition_id: float(queue.ttl)
            for claim in claims
            if (queue := queues[claim.lane.queue_name]) is not None and queue.ttl
        }
        if ageing:
            await self._link.fetch("expire", list(ageing), list(ageing.values()))

    async def _stops(self, claims: list[Claim], queues: dict[str, Queue | None]) -> dict[Claim, int]:
        """For queues with delayed processing: the first offset of each claim that is too young."""
        delayed = [
            (claim, queue.delayed_processing)
            for claim in claims
            if (queue := queues[claim.lane.queue_name]) is not None and queue.delayed_processing > 0
        ]
        if not delayed:
            return {}
        rows = await self._link.fetch(
            "ripe_until",
            [claim.partition_id for claim, _ in delayed],
            [claim.lane.group_id for claim, _ in delayed],
            [claim.want for claim, _ in delayed],
            [float(delay) for _, delay in delayed],
        )
        stops: dict[Claim, int] = {}
        for row in rows:
            claim = delayed[row["slot"] - 1][0]
            stops[claim] = row["first_offset"]
            claim.hold_for, claim.not_due = max(0.001, row["ripe_in"]), True
        return stops

    async def _conflate(self, claims: list[Claim], stops: dict[Claim, int]) -> None:
        """Let claims have the newest message that is available, and no other."""
        for claim in claims:
            claim.want = 1
        looking = [(claim, stops.get(claim, _NO_STOP)) for claim in claims]
        newest: dict[Claim, int] = {}
        while looking:
            # Few at once, as each brings a segment.
            some, looking = looking[:_CONFLATED_AT_ONCE], looking[_CONFLATED_AT_ONCE:]
            rows = await self._link.fetch(
                "conflation_segments",
                [claim.partition_id for claim, _ in some],
                [claim.lane.group_id for claim, _ in some],
                [stop for _, stop in some],
            )
            for row in rows:
                claim, stop = some[row["slot"] - 1]
                # What comes after this look is for the next one: the first of several such is not the newest.
                stops[claim] = min(stops.get(claim, _NO_STOP), row["next_offset"])
                if row["base_offset"] is None:
                    continue
                try:
                    segment = read_segment(self._envelope, row)
                    alive = _newest_alive(segment, row["first_offset"], stop)
                except (EnvelopeError, MalformedSegment):
                    # It is what the claim finds, and says so.
                    newest[claim] = max(row["base_offset"], row["first_offset"])
                    continue
                if alive is not None:
                    newest[claim] = alive
                    if self._cache.version == self._cache_version:
                        self._cache.put_read(claim.partition_id, [segment])
                elif segment.base_offset > row["first_offset"]:
                    # All of it was deleted: what comes before is newer.
                    looking.append((claim, segment.base_offset))
        if not newest:
            return
        behind = sorted(newest, key=_lock_order)
        for row in await self._link.fetch(
            "conflate",
            [claim.partition_id for claim in behind],
            [claim.lane.group_id for claim in behind],
            [newest[claim] for claim in behind],
        ):
            self._meter.conflated(behind[row["slot"] - 1].lane.queue_name, row["passed"])

    async def _lease(
        self, claims: list[Claim], queues: dict[str, Queue | None], stops: dict[Claim, int]
    ) -> list[Record]:
        return await self._link.fetch(
            "claim",
            *self._columns(claims, queues),
            *self._spans(claims),
            [stops.get(claim, _NO_STOP) for claim in claims],
            max(1, self._room),
        )

    async def _read(self, claims: list[Claim], rows: Sequence[Record]) -> None:
        """Put what was leased into its claims; a claim with several segments has several rows."""
        by_slot: dict[int, list[Record]] = {}
        for row in rows:
            by_slot.setdefault(row["slot"], []).append(row)
        for slot, own in by_slot.items():
            await self._take(claims[slot - 1], own)

    async def _take(self, claim: Claim, rows: list[Record]) -> None:
        """Put what was leased into its claim: a row for each segment, or one without where this worker has them."""
        first = rows[0]
        claim.start, claim.end = first["lease_start"], first["lease_end"]
        claim.left = first["next_offset"] - claim.end
        claim.hold_for = 0.0 if claim.auto_ack else _lease_seconds(claim, await self._queue(claim.lane))
        claim.not_due = False
        claim.attempts = first["attempts"]
        if first["base_offset"] is None:
            held = self._cache.get(claim.partition_id, claim.start, claim.end)
            if held is not None:
                self._fit(claim, held)
                return
            rows = await self._link.fetch(
                "segments_between", claim.partition_id, claim.start, claim.end, max(1, self._room)
            )
        segments: list[Segment] = []
        try:
            for row in rows:
                if row["body"] is None or self._room <= 0:
                    _cut(claim, row["base_offset"])
                    break
                segments.append(read_segment(self._envelope, row))
                self._room -= _weight(segments[-1], claim.start, claim.end)
        except (EnvelopeError, MalformedSegment) as error:
            claim.error = UnreadableMessage(f"queue {claim.lane.queue_name!r} cannot be read: {error}")
            claim.error.__cause__ = error
            return
        claim.segments = segments
        if self._cache.version == self._cache_version:
            # Else a partition was changed during the read: the segments may be from before the change.
            self._cache.put_read(claim.partition_id, claim.segments)

    def _fit(self, claim: Claim, held: list[Segment]) -> None:
        """Take as many of the segments that are in memory as there is room for."""
        for count, segment in enumerate(held):
            if self._room <= 0:
                _cut(claim, segment.base_offset)
                held = held[:count]
                break
            self._room -= _weight(segment, claim.start, claim.end)
        claim.segments = held

    async def _give_back(self, claims: list[Claim]) -> None:
        """Undo claims that cannot be delivered, so that nothing is skipped, and fail their pops."""
        if not claims:
            return
        await self._link.fetch(
            "unclaim",
            [claim.partition_id for claim in claims],
            [claim.lane.group_id for claim in claims],
            [claim.start for claim in claims],
            [claim.end for claim in claims],
            [claim.auto_ack and (claim.error is not None or claim.unread) for claim in claims],
        )
        for claim in claims:
            claim.left += claim.end - claim.start
            claim.hold_for = 0.0
            if claim.error is not None:
                claim.hold_for = _UNREADABLE_PAUSE
                for pop in claim.pops:
                    pop.fail(claim.error)

    async def _give_back_rest(self, claims: list[Claim]) -> None:
        """Let claims end, in PostgreSQL too, where they were cut."""
        leased = [claim for claim in claims if claim.lease_id]
        consumed = [claim for claim in claims if not claim.lease_id]
        await self._shorten(leased)
        if consumed:
            await self._link.fetch(
                "unclaim",
                [claim.partition_id for claim in consumed],
                [claim.lane.group_id for claim in consumed],
                [claim.end for claim in consumed],
                [claim.cut_from for claim in consumed],
                [True] * len(consumed),
            )

    async def _shorten(self, claims: list[Claim]) -> None:
        if claims:
            await self._link.fetch(
                "shorten_leases",
                [claim.partition_id for claim in claims],
                [claim.lane.group_id for claim in claims],
                [claim.lease_id for claim in claims],
                [claim.end for claim in claims],
            )

    async def _explain(self, missed: list[Claim], queues: dict[str, Queue | None]) -> None:
        """Why claims got nothing, and when it is worth trying again."""
        missed = [claim for claim in missed if claim.hold_for == 0]
        if not missed:
            return
        options = [queues[claim.lane.queue_name] for claim in missed]
        rows = await self._link.fetch(
            "why_unclaimed",
            [claim.partition_id for claim in missed],
            [claim.lane.group_id for claim in missed],
            [float(queue.window_buffer) if queue else 0.0 for queue in options],
        )
        for row in rows:
            claim = missed[row["slot"] - 1]
            if not row["present"]:
                claim.gone = True
                self._catalog.forget_partition_id(claim.partition_id)
                continue
            if not row["has_cursor"]:
                claim.lane.cursors.discard(claim.partition_id)
                claim.left = 1
                continue
            claim.left = row["available"]
            if claim.left > 0:
                leased_for, quiet_for = row["held_for"] or 0.0, row["quiet_for"] or 0.0
                claim.hold_for, claim.not_due = max(0.0, leased_for, quiet_for), quiet_for > leased_for

    async def _deliver(self, claims: list[Claim], partitions: dict[int, Partition]) -> None:
        """Render what was leased, and answer."""
        claims = await self._leave_out_deleted(claims)
        shares: dict[Pop, list[tuple[Claim, int, int]]] = {}
        for claim in claims:
            start = claim.start
            for pop in claim.pops:
                end = min(claim.end, start + pop.request.batch)
                if end > start:
                    shares.setdefault(pop, []).append((claim, start, end))
                start = end
        empty: list[Claim] = []
        refused: list[Claim] = []
        leased: list[Claim] = []
        for pop, own in shares.items():
            if pop.done:
                # The client has disconnected: another consumer is to have the messages, and at once.
                refused += [claim for claim, _, _ in own if len(claim.pops) == 1]
                continue
            framed = pop.request.frames and not own[0][0].lane.conflates
            body = (self._render_frames if framed else self._render)(pop, own, partitions)
            if body is None:
                empty += [claim for claim, _, _ in own]
                continue
            for claim, start, end in own:
                if claim.lease_id:
                    lease = Lease(claim.partition_id, claim.lane.group_id, start, end, claim.segments)
                    self._leases.add(claim.lease_id, lease)
                    leased.append(claim)
            pop.resolve(body)
        self._notify(leased, [claim for claim in claims if claim.auto_ack and claim.left == 0])
        await self._give_back(refused)
        await self._skip([claim for claim in empty if claim.lease_id])
        for claim in empty:
            claim.hold_for = 0.0

    def _notify(self, leased: list[Claim], emptied: list[Claim]) -> None:
        """Keep the other workers of the host from claiming partitions that were just leased or emptied."""
        events = [held(c.lane.queue_id, c.partition_id, c.lane.group_id, c.hold_for) for c in leased]
        events += [taken(c.lane.queue_id, c.partition_id, c.lane.group_id) for c in emptied]
        self._notifications.hint(events)

    async def _leave_out_deleted(self, claims: list[Claim]) -> list[Claim]:
        """End leases before the deleted messages at their end, which are never acked; returns those left with any."""
        shorter: list[Claim] = []
        empty: list[Claim] = []
        for claim in claims:
            end = _last_alive(claim) if claim.lease_id else claim.end
            if end == claim.start:
                empty.append(claim)
            elif end < claim.end:
                claim.left += claim.end - end
                claim.end = end
                shorter.append(claim)
        await self._skip(empty)
        for claim in empty:
            claim.hold_for = 0.0
        await self._shorten(shorter)
        return [claim for claim in claims if claim not in empty] if empty else claims

    def _render(self, pop: Pop, shares: list[tuple[Claim, int, int]], partitions: dict[int, Partition]) -> bytes | None:
        """The answer of a pop, or None when every message in its spans was deleted."""
        group = _encode(pop.request.group)
        out: list[bytes] = []
        now = time.time()
        for claim, start, end in shares:
            partition = partitions.get(claim.partition_id)
            name = _encode(partition.name if partition else "")
            uuid = partition.uuid.encode() if partition else b""
            tail = b',"partitionId":"%b","partition":%b,"leaseId":"%b","consumerGroup":%b}' % (
                uuid,
                name,
                claim.lease_id.encode(),
                group,
            )
            delivered: list[tuple[int, datetime]] = []
            for segment in claim.segments:
                base = segment.base_offset
                if base >= end or base + segment.count <= start:
                    # Of the segments that several pops share, each takes a few.
                    continue
                rendered = segment.render(max(0, start - base), min(segment.count, end - base), tail, out)
                delivered.append((rendered, segment.created_at))
            self._meter.popped(claim.lane.queue_name, delivered, now, auto_ack=claim.auto_ack)
        if not out:
            return None
        claim = shares[0][0]
        first_partition = partitions.get(claim.partition_id)
        return b"".join(
            (
                b'{"success":true,"queue":%b,"partition":%b,"partitionId":"%b","leaseId":"%b","consumerGroup":%b,"messages":['
                % (
                    _encode(claim.lane.queue_name),
                    _encode(first_partition.name if first_partition else ""),
                    first_partition.uuid.encode() if first_partition else b"",
                    claim.lease_id.encode(),
                    group,
                ),
                b",".join(out),
                b'],"partitionsClaimed":%d%b' % (len(shares), b',"conflation":true}' if claim.lane.conflates else b"}"),
            )
        )

    def _render_frames(
        self, pop: Pop, shares: list[tuple[Claim, int, int]], partitions: dict[int, Partition]
    ) -> bytes | None:
        """The same as binary records."""
        now = time.time()
        delivered: list[Delivered] = []
        for claim, start, end in shares:
            partition = partitions.get(claim.partition_id)
            segments = [one for one in claim.segments if one.base_offset < end and one.end_offset > start]
            name = partition.name if partition else ""
            delivered.append(Delivered(claim.partition_id, name, start, end, claim.attempts + 1, segments))
            spans = [(one, max(0, start - one.base_offset), min(one.count, end - one.base_offset)) for one in segments]
            counted = [
                (sum(not one.is_deleted(i) for i in range(first, last)), one.created_at) for one, first, last in spans
            ]
            self._meter.popped(claim.lane.queue_name, counted, now, auto_ack=claim.auto_ack)
        claim = shares[0][0]
        own = b'{"conflationConflict":true}' if pop.request.conflation else b""
        return encode_frames(claim.lane.queue_name, claim.lease_id, pop.request.group, own, delivered)

    async def _skip(self, claims: list[Claim]) -> None:
        """Pass over spans in which nothing is left to deliver."""
        if claims:
            await self._link.fetch(
                "ack",
                [claim.partition_id for claim in claims],
                [claim.lane.group_id for claim in claims],
                [claim.lease_id for claim in claims],
                [claim.end for claim in claims],
            )


def _lock_order(claim: Claim) -> tuple[int, int]:
    """Cursors are always locked in this order, so two workers cannot wait for each other."""
    return claim.partition_id, claim.lane.group_id


def _lease_seconds(claim: Claim, queue: Queue | None) -> float:
    return float(claim.pops[0].request.lease_seconds or (queue.lease_seconds if queue else 60))


def _weight(segment: Segment, start: int, end: int) -> int:
    """What the messages of a segment from `start` to `end` take in an answer, more or less."""
    base, count = segment.base_offset, segment.count
    wanted = min(end, base + count) - max(start, base)
    return (segment.nbytes // (count or 1) + _MESSAGE_BYTES) * wanted


def _cut(claim: Claim, end: int) -> None:
    """Let a claim end before what is not read."""
    if end <= claim.start:
        claim.unread = True
        return
    claim.cut_from = claim.end
    claim.left += claim.end - end
    claim.end = end


def _last_alive(claim: Claim) -> int:
    """The offset after the last message of a claim that was not deleted; its start when all were."""
    for segment in reversed(claim.segments):
        base = segment.base_offset
        for offset in range(min(claim.end, segment.end_offset) - 1, max(claim.start, base) - 1, -1):
            if not segment.is_deleted(offset - base):
                return offset + 1
    return claim.start


def _newest_alive(segment: Segment, first: int, stop: int) -> int | None:
    """The offset of the last message from `first` to `stop` that was not deleted."""
    base = segment.base_offset
    for offset in range(min(segment.end_offset, stop) - 1, max(base, first) - 1, -1):
        if not segment.is_deleted(offset - base):
            return offset
    return None


def _is_plain(queue: Queue | None) -> bool:
    """Whether messages of a queue can be had as soon as they are there."""
    return queue is not None and not queue.ttl and not queue.delayed_processing
