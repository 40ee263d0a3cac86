"""Notes of rare changes: left in the transaction that makes one, and read by workers that were not told of it.

Workers tell each other what they change, but another host may not hear it: datagrams get lost, and peers need not be
configured at all. What a worker remembers of queues, groups and partitions is therefore never wrong for longer than it
takes to read the log of changes again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

import asyncpg

from queen.broker.catalog import Catalog, Queue
from queen.broker.events import Event, EventKind, named, partition_changed
from queen.concurrency import BackgroundTask
from queen.errors import QueenError
from queen.storage.database import Database, Fetcher, Record

log = logging.getLogger(__name__)

KEPT_SECONDS = 600.0
"""How long notes are kept. Who has not read for half of that may have missed some."""
_MOST_TOLD = 10_000


async def note_group_change(transaction: Fetcher, group: str) -> Event:
    """Leave a note that a group was changed; returns what to tell the workers once that is committed."""
    (row,) = await transaction.fetch("note_change", EventKind.GROUP_CHANGED.value, 0, 0, group)
    return named(EventKind.GROUP_CHANGED, group, row["xid"])


async def note_partition_change(transaction: Fetcher, queue_id: int, partition_id: int) -> Event:
    """The same for a partition in the middle of which messages were removed."""
    await transaction.fetch("note_change", EventKind.PARTITION_CHANGED.value, queue_id, partition_id, "")
    return partition_changed(queue_id, partition_id)


class ChangeReader:
    """Reads the log of changes every little while, and has what is remembered of them corrected."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        *,
        known_queues: Callable[[], Collection[str]],
        queues_are: Callable[[Mapping[str, Queue | None]], None],
        take_in: Callable[[Event], None],
        forget_everything: Callable[[], None],
        interval: float,
    ) -> None:
        """`known_queues` are the names that anybody here cares for; `queues_are` is told what is stored under them."""
        self._database = database
        self._catalog = catalog
        self._known_queues = known_queues
        self._queues_are = queues_are
        self._take_in = take_in
        self._forget_everything = forget_everything
        self._interval = interval
        self._horizon: int | None = None
        self._read_at = 0.0
        self._seen: set[int] = set()
        self._told: set[int] = set()
        self._background = BackgroundTask()

    def start(self) -> None:
        self._background.start(self._keep_reading())

    async def stop(self) -> None:
        await self._background.stop()

    def told(self, change: int) -> None:
        """A change has been taken in already: its note need not be heeded."""
        if len(self._told) >= _MOST_TOLD:
            self._told.clear()
        self._told.add(change)

    async def read(self) -> None:
        """Take in the notes that were left since the last time."""
        now = asyncio.get_running_loop().time()
        missed = self._horizon is None or now - self._read_at > KEPT_SECONDS / 2
        rows = await self._database.fetch("changes_since", 1 << 62 if self._horizon is None else self._horizon)
        notes = [row for row in rows if row["id"] is not None]
        if missed:
            self._forget_everything()
        else:
            await self._heed([note for note in notes if note["id"] not in self._seen])
        horizon: int = rows[0]["horizon"]
        # Notes from there on are read again, because others beside them may not be visible yet.
        self._seen = {note["id"] for note in notes if note["xid"] >= horizon}
        self._told = {change for change in self._told if change >= horizon}
        self._horizon, self._read_at = horizon, now

    async def _keep_reading(self) -> None:
        while True:
            try:
                await self.read()
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("the log of changes cannot be read: %s", error)
            await asyncio.sleep(self._interval)

    async def _heed(self, notes: list[Record]) -> None:
        queues = {note["name"] for note in notes if note["kind"] == EventKind.QUEUE_CHANGED}
        known = queues & {*self._known_queues()} if queues else set()
        if known:
            found = await self._catalog.stored_queues(known)
            stored = {name: found.get(name) for name in known}
            for name, queue in stored.items():
                self._catalog.queue_is(name, queue)
            self._queues_are(stored)
        for note in notes:
            if note["kind"] != EventKind.QUEUE_CHANGED and note["xid"] not in self._told:
                # How many were pushed is not noted: the claim finds out.
                number = 1 if note["kind"] == EventKind.PUSHED else 0
                self._take_in((note["kind"], note["queue_id"], note["partition_id"], 0, number, note["name"]))
