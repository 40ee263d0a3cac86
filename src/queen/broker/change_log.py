"""The change log: an entry for each rare change, written in the transaction that makes it, and read by every worker.

Workers notify each other of what they change, but a notification may not reach another host: datagrams get lost, and
peers need not be configured at all. What a worker remembers of queues, groups and partitions is therefore never stale
for longer than the interval at which it reads the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import asyncpg

from queen.broker.events import Event, EventKind, named, partition_changed
from queen.broker.notifications import Handlers, Notifications
from queen.concurrency import BackgroundTask
from queen.errors import QueenError
from queen.log.catalog import Catalog, Queue
from queen.storage.database import HEARTBEAT_SESSION, Database, Fetcher, Record

log = logging.getLogger(__name__)

KEPT_SECONDS = 600.0
"""How long entries are kept. A worker that has not read for half of that may have missed some."""
_MOST_APPLIED = 10_000
_PUSHED = EventKind.PUSHED.value


async def log_group_change(transaction: Fetcher, group: str) -> Event:
    """Log that a group was changed; returns the event to publish once that is committed."""
    (row,) = await transaction.fetch("note_change", EventKind.GROUP_CHANGED.value, 0, 0, group)
    return named(EventKind.GROUP_CHANGED, group, row["xid"])


async def log_partition_change(transaction: Fetcher, queue_id: int, partition_id: int) -> Event:
    """Log that messages in the middle of a partition were removed; returns the event to publish."""
    await transaction.fetch("note_change", EventKind.PARTITION_CHANGED.value, queue_id, partition_id, "")
    return partition_changed(queue_id, partition_id)


class QueueCache(Protocol):
    """What a worker remembers of queues."""

    def known_queues(self) -> Collection[str]:
        """The names of the queues of which anything is remembered."""
        ...

    def correct(self, stored: Mapping[str, Queue | None]) -> None:
        """Forget what differs from what is stored under these names; None: nothing is."""
        ...

    def forget_everything(self) -> None: ...


class ChangeReader:
    """Reads the change log at an interval, and corrects what the worker remembers."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        notifications: Notifications,
        on_gap: Callable[[], None],
        *,
        interval: float,
        workers: int,
    ) -> None:
        """`on_gap` is called when entries may have been missed, beside `forget_everything` of the caches; `workers` is
        how many this host has."""
        self._database = database
        self._catalog = catalog
        self._notifications = notifications
        self._on_gap = on_gap
        self._caches: list[QueueCache] = [catalog]
        self._interval = interval
        self._workers = workers
        self._on_writes: tuple[Callable[[], None], ...] = ()
        self.on_entries: Callable[[Sequence[Record]], None] = lambda entries: None
        """Called with new entries, whether their changes were notified of or not."""
        self._next_xid = 0
        self._horizon: int | None = None
        self._read_at = 0.0
        self._read: set[int] = set()
        self._applied: set[int] = set()
        self._background = BackgroundTask()

    def add_cache(self, cache: QueueCache) -> None:
        """Correct this one, too."""
        self._caches.append(cache)

    def on_unnotified_writes(self, *callbacks: Callable[[], None]) -> None:
        """Call back when something was written, and another host that sends no notifications may have done it."""
        self._on_writes = callbacks

    def handlers(self) -> Handlers:
        """A group's change that was notified of is applied already when its entry is read."""
        return {EventKind.GROUP_CHANGED: lambda event: self.mark_applied(event[4])}

    def start(self) -> None:
        self._background.start(self._run())

    async def stop(self) -> None:
        await self._background.stop()

    def mark_applied(self, change: int) -> None:
        """The change has been applied: its entry is skipped."""
        if len(self._applied) >= _MOST_APPLIED:
            self._applied.clear()
        self._applied.add(change)

    async def read(self) -> None:
        """Apply the entries that were written since the last time."""
        now = asyncio.get_running_loop().time()
        missed = self._horizon is None or now - self._read_at > KEPT_SECONDS / 2
        rows = await self._database.fetch("changes_since", 1 << 62 if self._horizon is None else self._horizon)
        entries = [row for row in rows if row["id"] is not None]
        if missed:
            self._forget_everything()
        else:
            new = [entry for entry in entries if entry["id"] not in self._read]
            await self._apply(new)
            if new:
                self.on_entries(new)
        horizon: int = rows[0]["horizon"]
        # Entries from there on are read again, because others beside them may not be visible yet.
        self._read = {entry["id"] for entry in entries if entry["xid"] >= horizon}
        self._applied = {change for change in self._applied if change >= horizon}
        self._horizon, self._read_at = horizon, now
        await self._notice_writes(rows[0]["next_xid"])

    async def _run(self) -> None:
        while True:
            try:
                await self.read()
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("change log could not be read: %s", error)
            await asyncio.sleep(self._interval)

    async def _apply(self, entries: list[Record]) -> None:
        changed = {entry["name"] for entry in entries if entry["kind"] == EventKind.QUEUE_CHANGED}
        if changed:
            changed &= {name for cache in self._caches for name in cache.known_queues()}
        if changed:
            found = await self._catalog.stored_queues(changed)
            stored = {name: found.get(name) for name in changed}
            for cache in self._caches:
                cache.correct(stored)
        self._notifications.handle(
            # How many were pushed is not recorded: the claim finds out.
            (entry["kind"], entry["queue_id"], entry["partition_id"], 0, int(entry["kind"] == _PUSHED), entry["name"])
            for entry in entries
            if entry["kind"] != EventKind.QUEUE_CHANGED and entry["xid"] not in self._applied
        )

    async def _notice_writes(self, next_xid: int) -> None:
        """Let waiting requests look for what a host without peers has written since the last time."""
        written, self._next_xid = next_xid != self._next_xid, next_xid
        if not written or not self._on_writes or self._notifications.reaches_hosts:
            return
        (row,) = await self._database.fetch("count_workers", HEARTBEAT_SESSION)
        if row["workers"] > self._workers:
            for callback in self._on_writes:
                callback()

    def _forget_everything(self) -> None:
        for cache in self._caches:
            cache.forget_everything()
        self._on_gap()
