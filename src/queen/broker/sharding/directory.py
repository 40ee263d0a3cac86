"""Where queues, topics and namespaces live, as one worker knows it.

Nobody keeps a list of all names. What lives on a shard is in that shard's own tables. A name is looked for where its
hash says; there it is, or a note of where it is instead, or it is new. So a name whose shard and whose hash's shard are
alive can be found, whatever else is dead, and names that were found are remembered.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from array import array
from bisect import bisect_left
from collections.abc import Sequence

import asyncpg

from queen.concurrency import BackgroundTask
from queen.errors import DatabaseUnavailable, Overloaded, QueenError
from queen.storage.database import Database, Record
from queen.storage.shard_setup import check_number
from queen.wire.shards import PARTITION_BITS, Kind, Name, home, shard_of_partition

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_MOST_REMEMBERED = 1_000_000
_TRANSIT_SECONDS = 0.05
_TRANSIT_ATTEMPTS = 100
_HOLDERS = {Kind.QUEUE: "holds_queue", Kind.TOPIC: "holds_topic", Kind.NAMESPACE: "holds_namespace"}


class Directory:
    """Finds shards. Databases are given in the order of their numbers."""

    def __init__(self, databases: Sequence[Database]) -> None:
        self._databases = databases
        self._layout: tuple[int, ...] = tuple(range(len(databases)))
        self._versions: dict[int, int] = {}
        self._places: dict[Name, int] = {}
        # As they were before something moved: for when nobody can be asked.
        self._remembered: dict[Name, int] = {}
        self._foreign: dict[int, array[int]] = {}
        self._changed = asyncio.Event()
        self._looking = asyncio.Lock()
        self._background = BackgroundTask()

    @property
    def count(self) -> int:
        return len(self._databases)

    @property
    def layout(self) -> tuple[int, ...]:
        """The shards that take new names."""
        return self._layout

    async def start(self) -> None:
        """Learn what can be learnt now, then keep up with it."""
        await self.look()
        self._background.start(self._keep_looking())

    async def stop(self) -> None:
        await self._background.stop()

    def known(self, name: Name) -> int | None:
        """The shard of a name that was found before."""
        return self._places.get(name)

    async def find(self, name: Name) -> int:
        """The shard that a name lives on, or (a new one) is to be made on."""
        known = self._places.get(name)
        if known is not None:
            return known
        if not name.can_exist:
            # Whoever is asked says so.
            return self._layout[0]
        versions = dict(self._versions)
        try:
            shard = await self._follow(name)
        except DatabaseUnavailable:
            return await self._guess(name)
        if versions == self._versions:
            if len(self._places) >= _MOST_REMEMBERED:
                self._places.clear()
            self._places[name] = shard
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
            self._remembered[name] = shard
        return shard

    def of_partition(self, partition_id: int) -> int:
        """The shard that a partition lives on; one that nobody knows, where its id says."""
        for shard, ids in self._foreign.items():
            place = bisect_left(ids, partition_id)
            if place < len(ids) and ids[place] == partition_id:
                return shard
        born = shard_of_partition(partition_id)
        return born if born < len(self._databases) else 0

    def changed(self) -> asyncio.Event:
        """Set when something has moved after this was asked for."""
        return self._changed

    async def look(self, shards: Sequence[int] | None = None) -> bool:
        """See whether something has moved, on some shards or all of them; those that are away stay as they were."""
        everywhere = range(len(self._databases))
        async with self._looking:
            news = await asyncio.gather(
                *(self._has_news(number) for number in (everywhere if shards is None else shards))
            )
            if not any(news):
                return False
            # What has left one shard has come to another, or is on its way there. States are read before it is made to
            # arrive, and what is on the shards afterwards: what changes meanwhile is news the next time.
            states = await asyncio.gather(*(self._state(number) for number in everywhere))
            await asyncio.gather(*(self._complete_arrivals(number) for number in everywhere))
            await asyncio.gather(*(self._learn(number, state) for number, state in enumerate(states)))
        self._places.clear()
        self._changed.set()
        self._changed = asyncio.Event()
        return True

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self.look()
            except Exception:
                # Nobody else would look again.
                log.exception("looking after the shards failed; it is tried again")

    async def _has_news(self, number: int) -> bool:
        state = await self._state(number)
        if state is None:
            return False
        if state["arriving"] and await self._complete_arrivals(number):
            return True
        return bool(self._versions.get(number) != state["version"])

    async def _state(self, number: int) -> Record | None:
        """What a shard says of itself; None when it does not."""
        try:
            rows = await self._databases[number].fetch("shard_state")
        except (QueenError, asyncpg.PostgresError) as error:
            log.debug("shard %d says nothing: %s", number, error)
            return None
        if not rows:
            return None
        check_number(rows[0]["number"], number)
        return rows[0]

    async def _learn(self, number: int, state: Record | None) -> None:
        """Learn what lives on a shard that was in this state a moment ago."""
        if state is None:
            return
        lowest = number << PARTITION_BITS
        try:
            foreign = await self._databases[number].fetch("foreign_partitions", lowest, lowest + (1 << PARTITION_BITS))
        except (QueenError, asyncpg.PostgresError) as error:
            log.debug("shard %d says nothing: %s", number, error)
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
        """Follow what shards say about a name; None: it has left one shard and not come to the other yet."""
        left_by: uuid.UUID | None = None
        for _ in range(2 * len(self._databases) + 1):
            row = await self._note(name, shard)
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

    async def _guess(self, name: Name) -> int:
        """Who could say where it is cannot be asked: where it was, else whoever has it, else where its hash says.

        Should it be elsewhere, that shard refuses it; a push that waits in its spool meanwhile is sent on.
        """
        remembered = self._remembered.get(name)
        if remembered is not None:
            return remembered
        for number, database in enumerate(self._databases):
            try:
                if await database.fetch(_HOLDERS[name.kind], *(name.parts if name.kind is Kind.TOPIC else (name.key,))):
                    return number
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("shard %d does not say whether it has %s: %s", number, name, error)
        return home(name, self._layout)

    async def _note(self, name: Name, shard: int) -> Record | None:
        try:
            rows = await self._databases[shard].fetch("placement", name.kind.value, name.key)
        except DatabaseUnavailable as error:
            raise DatabaseUnavailable(f"shard {shard}, which knows where {name} is, cannot be reached") from error
        return rows[0] if rows else None

    async def _complete_arrivals(self, number: int) -> bool:
        """Finish moves whose mover has died after they had left the other shard."""
        completed = False
        try:
            arrivals = await self._databases[number].fetch("arrivals")
        except (QueenError, asyncpg.PostgresError) as error:
            log.debug("shard %d does not say what arrives: %s", number, error)
            return False
        for row in arrivals:
            source = row["shard"]
            if not 0 <= source < len(self._databases):
                continue
            try:
                notes = await self._databases[source].fetch("placement", row["kind"], row["name"])
                if notes and notes[0]["move_id"] == row["move_id"] and not notes[0]["arriving"]:
                    await self._databases[number].fetch("complete_move", row["move_id"])
                    completed = True
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("a move from shard %d to shard %d is left as it is: %s", source, number, error)
        return completed
