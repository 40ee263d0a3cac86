"""Ephemeral queues: their declarations are durable; their messages, in unlogged tables, are lost in a crash.

All that happens to one queue happens one after the other, under the lock of its ring.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

from queen.broker.events import Event, EventKind, named
from queen.broker.notifications import Notifications
from queen.errors import NotFound, QuotaExceeded
from queen.metrics.meter import Meter
from queen.storage.database import Database, Fetcher, Record, retry_transaction
from queen.wire.state.ephemeral import (
    NOT_FOUND,
    EphemeralAckBody,
    EphemeralAcked,
    EphemeralAckResult,
    EphemeralConfigured,
    EphemeralDeleted,
    EphemeralDelivered,
    EphemeralDepth,
    EphemeralGroup,
    EphemeralOptions,
    EphemeralPartition,
    EphemeralPopped,
    EphemeralPopQuery,
    EphemeralPushBody,
    EphemeralPushed,
    EphemeralQueue,
    EphemeralQueues,
    EphemeralReset,
)

_POLL_SECONDS: Final = 1.0
"""Fallback polling interval of waiting pops, in case a notification is lost."""
_RETRY_AFTER: Final = 1
"""Seconds after which a push to a full queue may be retried."""
_EPOCH_BITS: Final = 48
_AGAIN: Final = frozenset({"failed", "retry"})

_options: Final = msgspec.json.Decoder(EphemeralOptions)
# Of the messages of one pop. Many pops may be answered at the same time.
_MOST_BYTES: Final = 4 << 20


class _Ring(NamedTuple):
    """A locked queue: its epoch, its messages, and its options."""

    epoch: int
    length: int
    bytes: int
    options: EphemeralOptions


class Ephemeral:
    """The ephemeral queues, all of which live on one shard."""

    def __init__(
        self,
        database: Database,
        notifications: Notifications,
        meter: Meter,
        *,
        longest_wait_ms: int,
        most_bytes: int,
    ) -> None:
        """`longest_wait_ms`: how long a pop waits at most; `most_bytes`: where its answer ends, with one at least."""
        self._most_bytes = min(most_bytes, _MOST_BYTES)
        self._database = database
        self._notifications = notifications
        self._meter = meter
        self._longest_wait_ms = longest_wait_ms
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self.stopping = asyncio.Event()
        notifications.subscribe({EventKind.EPHEMERAL_PUSHED: self._on_pushed})

    def stop(self) -> None:
        """Have pops that wait answered."""
        self.stopping.set()
        for events in self._waiting.values():
            for event in events:
                event.set()

    async def configure(self, queue: str, options: EphemeralOptions) -> EphemeralConfigured:
        await self._database.fetch("ephemeral_declare", queue, msgspec.json.encode(options).decode())
        return EphemeralConfigured(queue, options)

    async def push(self, body: EphemeralPushBody) -> EphemeralPushed:
        """Append messages. Raises `QuotaExceeded` when they do not fit, and the queue is not one that drops others."""
        payloads = [bytes(message.payload).decode() for message in body.messages]
        if payloads:
            await retry_transaction(lambda: self._push(body.queue, body.partition, payloads))
            self._meter.count("ephemeral", "push", "ok", len(payloads))
            self._notifications.publish([named(EventKind.EPHEMERAL_PUSHED, body.queue)])
        return EphemeralPushed(len(payloads))

    async def _push(self, queue: str, partition: str, payloads: Sequence[str]) -> None:
        size = sum(len(payload.encode()) for payload in payloads)
        async with self._database.transaction() as transaction:
            ring = await self._open(transaction, queue)
            options = ring.options
            over = ring.length + len(payloads) - options.max_length
            heavy = ring.bytes + size - options.max_bytes
            if over > 0 or heavy > 0:
                hopeless = len(payloads) > options.max_length or size > options.max_bytes
                if options.policy == "reject" or hopeless:
                    self._meter.count("ephemeral", "push", "refused", len(payloads))
                    raise QuotaExceeded(
                        f"ephemeral queue {queue!r} is full: {len(payloads)} messages of {size} bytes do not fit beside"
                        f" {ring.length} of {ring.bytes} (maxLength is {options.max_length},"
                        f" maxBytes {options.max_bytes})",
                        _RETRY_AFTER,
                    )
                while over > 0 or heavy > 0:
                    # By length it is known how many; by bytes, a tenth at a time.
                    some = max(1, over, ring.length // 10 if heavy > 0 else 0)
                    await self._drop(transaction, queue, "bounds", oldest=some)
                    ring = await self._open(transaction, queue)
                    over = ring.length + len(payloads) - options.max_length
                    heavy = ring.bytes + size - options.max_bytes
            await transaction.fetch("ephemeral_push", queue, partition, list(payloads))

    async def pop(self, query: EphemeralPopQuery) -> EphemeralPopped:
        """Take messages; where the query says so, wait for some."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(query.timeout, self._longest_wait_ms) / 1000
        woken = asyncio.Event()
        waiting = self._waiting.setdefault(query.queue, set())
        waiting.add(woken)
        fill_until: float | None = None
        try:
            while True:
                woken.clear()
                left = deadline - loop.time()
                last = not query.wait or left <= 0 or self.stopping.is_set()
                full = last or (fill_until is not None and loop.time() >= fill_until)
                messages, window, ready, again_in = await retry_transaction(partial(self._pop, query, full))
                if messages or last:
                    self._meter.count("ephemeral", "pop", "auto_ack" if query.auto_ack else "ok", len(messages))
                    return EphemeralPopped(query.queue, messages)
                if ready and fill_until is None:
                    fill_until = loop.time() + window
                pause = min(left, again_in, *([max(0.001, fill_until - loop.time())] if fill_until is not None else []))
                try:
                    async with asyncio.timeout(pause):
                        await woken.wait()
                except TimeoutError:
                    pass
        finally:
            waiting.discard(woken)
            if not waiting:
                self._waiting.pop(query.queue, None)

    async def _pop(self, query: EphemeralPopQuery, full: bool) -> tuple[list[EphemeralDelivered], float, int, float]:
        """Messages; or none, for how long more of them are waited for, how many there are, when to look again."""
        queue, group = query.queue, query.group
        async with self._database.transaction() as transaction:
            if not query.wait and not await transaction.fetch("ephemeral_one", queue):
                # A group that only ever asked for what does not exist leaves nothing behind.
                return [], 0.0, 0, 0.0
            ring = await self._open(transaction, queue)
            options = ring.options
            await transaction.fetch("ephemeral_join", queue, group)
            rows = await self._ready(transaction, query, options)
            window = options.window_buffer
            if not full and window.ms and len(rows) < min(query.batch, window.count or query.batch):
                return [], window.ms / 1000, len(rows), _POLL_SECONDS
            if not rows:
                leased = await transaction.fetch("ephemeral_next", queue, group)
                return [], 0.0, 0, min(_POLL_SECONDS, leased[0]["seconds"] + 0.002 if leased else _POLL_SECONDS)
            seqs = [row["seq"] for row in rows]
            partitions = [row["partition"] for row in rows]
            leased_for = float(options.lease_seconds)
            await transaction.fetch("ephemeral_take", queue, group, seqs, partitions, not query.auto_ack, leased_for)
            if query.auto_ack:
                await self._retire(transaction, queue, seqs)
        return [_delivered(ring.epoch, row) for row in rows], 0.0, 0, 0.0

    async def _ready(self, fetcher: Fetcher, query: EphemeralPopQuery, options: EphemeralOptions) -> list[Record]:
        """The messages that a group may have now; those delivered too often are dropped."""
        while True:
            rows = await fetcher.fetch(
                "ephemeral_ready", query.queue, query.group, query.partition or None, query.batch, self._most_bytes
            )
            spent = [row["seq"] for row in rows if row["attempts"] > options.retry_limit]
            if not spent:
                return list(rows)
            await self._give_up(fetcher, query.queue, query.group, spent)

    async def ack(self, body: EphemeralAckBody) -> EphemeralAcked:
        results, again = await retry_transaction(lambda: self._ack(body))
        if again:
            self._notifications.publish([named(EventKind.EPHEMERAL_PUSHED, body.queue)])
        for result in results:
            self._meter.count("ephemeral", "ack", result.outcome)
        return EphemeralAcked(results)

    async def _ack(self, body: EphemeralAckBody) -> tuple[list[EphemeralAckResult], bool]:
        queue, group = body.queue, body.group
        places = [_place(ack.id) for ack in body.acks]
        async with self._database.transaction() as transaction:
            if not await transaction.fetch("ephemeral_lock", queue):
                return [
                    EphemeralAckResult(ack.id, "unknown" if place is None else "stale")
                    for ack, place in zip(body.acks, places, strict=True)
                ], False
            ring = await self._open(transaction, queue)
            seqs = [place[1] for place in places if place is not None and place[0] == ring.epoch]
            rows = await transaction.fetch("ephemeral_leases", queue, group, seqs)
            attempts = {row["seq"]: row["attempts"] for row in rows}
            done: list[int] = []
            again: list[int] = []
            spent: list[int] = []
            results: list[EphemeralAckResult] = []
            for ack, place in zip(body.acks, places, strict=True):
                if place is None or place[0] != ring.epoch:
                    results.append(EphemeralAckResult(ack.id, "unknown" if place is None else "stale"))
                    continue
                tried = attempts.pop(place[1], None)
                if tried is None:
                    results.append(EphemeralAckResult(ack.id, "unknown"))
                elif ack.status in _AGAIN and tried <= ring.options.retry_limit:
                    again.append(place[1])
                    results.append(EphemeralAckResult(ack.id, "redelivered"))
                else:
                    (spent if ack.status in _AGAIN else done).append(place[1])
                    results.append(EphemeralAckResult(ack.id, "acked"))
            await transaction.fetch("ephemeral_settle", queue, group, done, again)
            if spent:
                await self._give_up(transaction, queue, group, spent)
            await self._retire(transaction, queue, done)
        return results, bool(again)

    async def reset(self, queue: str) -> EphemeralReset:
        """Drop all messages with every lease and position; what the queue was declared with stays."""
        return EphemeralReset(queue, await self._clear(queue, "reset") or 0)

    async def delete(self, queue: str) -> EphemeralDeleted:
        """Remove a queue with what it was declared with."""
        declared = bool(await self._database.fetch("ephemeral_undeclare", queue))
        there = await self._clear(queue, "deleted", groups=True) is not None
        return EphemeralDeleted(queue, declared or there, declared)

    async def queues(self, search: str, limit: int | None, offset: int) -> EphemeralQueues:
        """A page of the queues, or all of them, by name."""
        rows = await self._database.fetch("ephemeral_page", search, limit, offset)
        first = rows or await self._database.fetch("ephemeral_page", search, 1, 0)
        return EphemeralQueues([_view(row) for row in rows], first[0]["total"] if first else 0)

    async def depth(self, queue: str) -> EphemeralDepth:
        rows = await self._database.fetch("ephemeral_one", queue)
        if not rows:
            raise NotFound(f"ephemeral queue {queue!r} does not exist", NOT_FOUND)
        view = _view(rows[0])
        partitions = await self._database.fetch("ephemeral_partitions", queue)
        groups = await self._database.fetch("ephemeral_group_stats", queue)
        return EphemeralDepth(
            view.queue,
            view.declared,
            view.options,
            view.length,
            view.bytes,
            [EphemeralPartition(row["partition"], row["length"]) for row in partitions],
            [EphemeralGroup(row["name"], row["pending"], row["leased"]) for row in groups],
        )

    async def _open(self, fetcher: Fetcher, queue: str) -> _Ring:
        """Lock the ring of a queue, without what is too old in it."""
        epoch = random.getrandbits(_EPOCH_BITS)
        (row,) = await fetcher.fetch("ephemeral_open", queue, epoch)
        options = _options.decode(row["options"]) if row["options"] else EphemeralOptions()
        dropped = 0
        if row["length"]:
            dropped = await self._drop(fetcher, queue, "ttl", seconds=float(options.ttl_seconds))
        if dropped:
            (row,) = await fetcher.fetch("ephemeral_open", queue, epoch)
        return _Ring(row["epoch"], row["length"], row["bytes"], options)

    async def _drop(
        self,
        fetcher: Fetcher,
        queue: str,
        why: str,
        *,
        seconds: float | None = None,
        oldest: int | None = None,
        some: Sequence[int] = (),
    ) -> int:
        (row,) = await fetcher.fetch("ephemeral_drop", queue, seconds, oldest, list(some))
        count: int = row["messages"]
        if count and why:
            self._meter.count("ephemeral", "drop", why, count)
        return count

    async def _give_up(self, fetcher: Fetcher, queue: str, group: str, seqs: Sequence[int]) -> None:
        """A group has had messages too often."""
        self._meter.count("ephemeral", "drop", "retry", len(seqs))
        await fetcher.fetch("ephemeral_settle", queue, group, list(seqs), [])
        await self._retire(fetcher, queue, seqs)

    async def _retire(self, fetcher: Fetcher, queue: str, seqs: Sequence[int]) -> None:
        """Remove the messages among these that every group has consumed."""
        if seqs:
            rows = await fetcher.fetch("ephemeral_done", queue, list(seqs))
            if rows:
                await self._drop(fetcher, queue, "", some=[row["seq"] for row in rows])

    async def _clear(self, queue: str, why: str, *, groups: bool = False) -> int | None:
        """Remove what a queue holds, perhaps with its groups; how many messages, None when it holds nothing."""
        async with self._database.transaction() as transaction:
            if not await transaction.fetch("ephemeral_lock", queue):
                return None
            (row,) = await transaction.fetch("ephemeral_clear", queue, groups)
        messages: int = row["messages"]
        if messages:
            self._meter.count("ephemeral", "drop", why, messages)
        return messages

    def _on_pushed(self, event: Event) -> None:
        for woken in self._waiting.get(event[5], ()):
            woken.set()


def _delivered(epoch: int, row: Record) -> EphemeralDelivered:
    id = f"e:{epoch:x}:{row['partition']}:{row['seq']}"
    return EphemeralDelivered(id, row["partition"], row["attempts"] + 1, Raw(row["payload"].encode()))


def _place(id: str) -> tuple[int, int] | None:
    """The epoch and number of a message; None when it is no id of ours."""
    kind, _, rest = id.partition(":")
    epoch, _, tail = rest.partition(":")
    try:
        return (int(epoch, 16), int(tail.rpartition(":")[2])) if kind == "e" else None
    except ValueError:
        return None


def _view(row: Record) -> EphemeralQueue:
    options = _options.decode(row["options"]) if row["options"] else EphemeralOptions()
    return EphemeralQueue(row["queue"], row["declared"], options, row["length"], row["bytes"])
