"""The shards of queues, topics and namespaces, as cached by one worker.

There is no central list of names. A name is looked up on the shard that its hash gives: either it is there, or a row of
`queen.placements` says where else, or it is new. So a name can be found while these two shards are available, whatever
the state of the others, and names that were found are cached.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from array import array
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import asyncpg

from queen.concurrency import BackgroundTask
from queen.errors import DatabaseUnavailable, Overloaded, QueenError
from queen.storage.database import Database, Record
from queen.storage.shard_setup import check_number
from queen.wire.shards import PARTITION_BITS, Kind, Name, home, shard_of_partition

log = logging.getLogger(__name__)

_REFRESH_SECONDS = 0.5
_MOST_CACHED = 1_000_000
_TRANSIT_SECONDS = 0.05
_TRANSIT_ATTEMPTS = 100
_HOLDERS = {Kind.QUEUE: "holds_queue", Kind.TOPIC: "holds_topic", Kind.NAMESPACE: "holds_namespace"}


class Directory:
    """Finds the shard of a name. Databases are given in the order of their shard numbers.

    `on_change` is called after moves: whatever is known about the contents of a shard may be from before them.
    """

    def __init__(self, databases: Sequence[Database], on_change: Callable[[], None] = lambda: None) -> None:
        self._databases = databases
        self._on_change = on_change
        self._layout: tuple[int, ...] = tuple(range(len(databases)))
        self._versions: dict[int, int] = {}
        self._places: dict[Name, int] = {}
        # Also names from before the last move: for when the shard that knows better is unavailable.
        self._last_places: dict[Name, int] = {}
        self._foreign: dict[int, array[int]] = {}
        self._changed = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._background = BackgroundTask()

    @property
    def count(self) -> int:
        return len(self._databases)

    @property
    def layout(self) -> tuple[int, ...]:
        """The shards that take new names."""
        return self._layout

    async def start(self) -> None:
        """Refresh, now and periodically."""
        await self.refresh()
        self._background.start(self._refresh_periodically())

    async def stop(self) -> None:
        await self._background.stop()

    def known(self, name: Name) -> int | None:
        """The cached shard of a name."""
        return self._places.get(name)

    async def find(self, name: Name) -> int:
        """The shard that has a name, or where a new name is to be created."""
        known = self._places.get(name)
        if known is not None:
            return known
        if not name.can_exist:
            # Any shard rejects it.
            return self._layout[0]
        while True:
            versions = dict(self._versions)
            try:
                shard = await self._follow(name)
            except DatabaseUnavailable:
                return await self._find_without_home(name)
            # Read while moves became known: it may be from before them, without another notification of these.
            if versions == self._versions:
                break
        if len(self._places) >= _MOST_CACHED:
            self._places.clear()
        self._places[name] = shard
        if len(self._last_places) >= _MOST_CACHED:
            self._last_places.clear()
        self._last_places[name] = shard
        return shard

    def of_partition(self, partition_id: int) -> int:
        """The shard of a partition; of an unknown one, where its id says it was created."""
        for shard, ids in self._foreign.items():
            place = bisect_left(ids, partition_id)
            if place < len(ids) and ids[place] == partition_id:
                return shard
        born = shard_of_partition(partition_id)
        return born if born < len(self._databases) else 0

    def changed(self) -> asyncio.Event:
        """An event that is set at the next move."""
        return self._changed

    async def moves_before(
        self, answer: asyncio.Future[Any], find: Callable[[], Awaitable[object]], place: object
    ) -> bool:
        """Wait for an answer; returns True as soon as `find` gives another place, if there is none by then."""
        while True:
            moved: asyncio.Future[Any] = asyncio.ensure_future(self.changed().wait())
            try:
                await asyncio.wait((answer, moved), return_when=asyncio.FIRST_COMPLETED)
            finally:
                moved.cancel()
            if answer.done():
                return False
            if await find() != place:
                return not answer.done()

    async def refresh(self, shards: Sequence[int] | None = None) -> bool:
        """Check some shards, or all, for moves; returns whether there were any. Unavailable shards keep their state."""
        everywhere = range(len(self._databases))
        async with self._refreshing:
            changes = await asyncio.gather(
                *(self._has_changed(number) for number in (everywhere if shards is None else shards))
            )
            if not any(changes):
                return False
            # What has left one shard is on another, or in transit. States are read before moves are completed, and the
            # contents of the shards afterwards: a change in between is seen by the next refresh.
            states = await asyncio.gather(*(self._state(number) for number in everywhere))
            await asyncio.gather(*(self._complete_arrivals(number) for number in everywhere))
            await asyncio.gather(*(self._load(number, state) for number, state in enumerate(states)))
        self._places.clear()
        self._on_change()
        self._changed.set()
        self._changed = asyncio.Event()
        return True

    async def _refresh_periodically(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            try:
                await self.refresh()
            except Exception:
                # An unexpected error must not end the loop.
                log.exception("refresh of the shard directory failed; retrying")

    async def _has_changed(self, number: int) -> bool:
        state = await self._state(number)
        if state is None:
            return False
        if state["arriving"] and await self._complete_arrivals(number):
            return True
        return bool(self._versions.get(number) != state["version"])

    async def _state(self, number: int) -> Record | None:
        """The state row of a shard; None if it is unavailable."""
        try:
            rows = await self._databases[number].fetch("shard_state")
        except (QueenError, asyncpg.PostgresError) as error:
            log.debug("shard %d is unavailable: %s", number, error)
            return None
        if not rows:
            return None
        check_number(rows[0]["number"], number)
        return rows[0]

    async def _load(self, number: int, state: Record | None) -> None:
        """Load what lives on a shard, whose state was just read."""
        if state is None:
            return
        lowest = number << PARTITION_BITS
        try:
            foreign = await self._databases[number].fetch("foreign_partitions", lowest, lowest + (1 << PARTITION_BITS))
        except (QueenError, asyncpg.PostgresError) as error:
            log.debug("shard %d is unavailable: %s", number, error)
            return
        self._versions[number] = state["version"]
        self._foreign[number] = array("q", [row["id"] for row in foreign])
        if not self._foreign[number]:
            del self._foreign[number]
        if max(state["layout"]) < len(self._databases):
            self._layout = tuple(state["layout"])

    async def _follow(self, name: Name) -> int:
        for _ in range(_TRANSIT_ATTEMPTS):
            shard = await self._end_of(name, home(name, self._layout))
            if shard is not None:
                return shard
            await asyncio.sleep(_TRANSIT_SECONDS)
        raise Overloaded(f"{name} is being moved to another shard; try again soon")

    async def _end_of(self, name: Name, shard: int) -> int | None:
        """Follow the placements of a name; None: it is in transit between two shards."""
        left_by: uuid.UUID | None = None
        for _ in range(2 * len(self._databases) + 1):
            row = await self._placement(name, shard)
            if row is None or row["shard"] == shard:
                return shard
            if row["arriving"]:
                if left_by == row["move_id"]:
                    await self._databases[shard].fetch("complete_move", row["move_id"])
                    return shard
                left_by = None
            else:
                left_by = row["move_id"]
            shard = row["shard"]
            if not 0 <= shard < len(self._databases):
                raise QueenError(f"{name} lives on shard {shard}, which DATABASE_URLS does not name: name all shards")
        return None

    async def _find_without_home(self, name: Name) -> int:
        """The shard that its hash gives is unavailable: its last known shard, else any that has it, else its hash's.

        If that is wrong, the shard rejects the name, and a push that was spooled for it is forwarded.
        """
        known = self._last_places.get(name)
        if known is not None:
            return known
        for number, database in enumerate(self._databases):
            try:
                if await database.fetch(_HOLDERS[name.kind], *(name.parts if name.kind is Kind.TOPIC else (name.key,))):
                    return number
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("shard %d is unavailable, it may have %s: %s", number, name, error)
        return home(name, self._layout)

    async def _placement(self, name: Name, shard: int) -> Record | None:
        try:
            rows = await self._databases[shard].fetch("placement", name.kind.value, name.key)
        except DatabaseUnavailable as error:
            raise DatabaseUnavailable(f"shard {shard} is unavailable, which has the placement of {name}") from error
        return rows[0] if rows else None

    async def _complete_arrivals(self, number: int) -> bool:
        """Complete moves that were interrupted after their commit on the other shard."""
        completed = False
        try:
            arrivals = await self._databases[number].fetch("arrivals")
        except (QueenError, asyncpg.PostgresError) as error:
            log.debug("shard %d is unavailable: %s", number, error)
            return False
        for row in arrivals:
            source = row["shard"]
            if not 0 <= source < len(self._databases):
                continue
            try:
                placed = await self._databases[source].fetch("placement", row["kind"], row["name"])
                if placed and placed[0]["move_id"] == row["move_id"] and not placed[0]["arriving"]:
                    await self._databases[number].fetch("complete_move", row["move_id"])
                    completed = True
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("move from shard %d to shard %d is still incomplete: %s", source, number, error)
        return completed
