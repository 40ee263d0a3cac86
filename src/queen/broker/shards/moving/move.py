"""Moves one queue or topic.

It is copied while it is used, then held for a moment: what is left is brought over and kept on the other shard, unseen.
The commit that removes it here, and leaves a note of where it went, is the moment at which it has moved. From then on
anybody may have the other shard show it: the mover, or any server that meets the note. Before that moment, whoever dies
leaves everything as it was.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from typing import Final, TypeAlias

import asyncpg

from queen.broker.shards.moving.contents import Contents, QueueContents, TopicContents, remove_leftovers
from queen.broker.shards.moving.fleet import Fleet
from queen.errors import Conflict, Overloaded
from queen.storage.database import Connection
from queen.storage.locks import AdvisoryLock
from queen.wire.shards import Kind, Name, home

Progress: TypeAlias = Callable[[str, int, int], None]
"""Told what is being done, and how much of how much is."""

_HOLD_ATTEMPTS: Final = 60
_HOLD_TIMEOUT: Final = "500ms"
_ITEM_TIMEOUT: Final = "10s"
_NOTE: Final = (
    "INSERT INTO queen.placements AS p (kind, name, shard, move_id, arriving, left_id) VALUES ($1, $2, $3, $4, $5, $6)"
    " ON CONFLICT (kind, name) DO UPDATE SET shard = excluded.shard, move_id = excluded.move_id,"
    " arriving = excluded.arriving, left_id = coalesce(excluded.left_id, p.left_id)"
)


class Mover:
    """Moves things between shards."""

    def __init__(self, fleet: Fleet, progress: Progress = lambda phase, done, total: None) -> None:
        self._fleet = fleet
        self._progress = progress

    async def move(self, name: Name, to: int) -> bool:
        """Bring a queue or topic to a shard; False when it was there already. Raises `NotFound` and `Conflict`."""
        target = self._fleet[to]
        await self._fleet.complete_arrivals()
        holder, id = await self._fleet.holder(name)
        if holder == to:
            await self._tidy_up(name, to)
            return False
        source = self._fleet[holder]
        await self._lock(source, holder)
        try:
            await self._forget_attempts(name, source, target)
            await self._refuse_in_maintenance(source, holder)
            move_id = uuid.uuid4()
            await _begin(source, move_id, name, holder, to)
            contents = self._contents(source, target, id, name)
            self._done, self._total = 0, await contents.total()
            await contents.copy()
            await self._hand_over(contents, name, move_id, holder, to)
            self._progress("completing", self._total, self._total)
            await target.fetchval("SELECT queen.complete_move($1)", move_id)
            await self._tidy_up(name, to)
        finally:
            await self._unlock(source)
        return True

    def _contents(self, source: Connection, target: Connection, id: int, name: Name) -> Contents:
        if name.kind is Kind.QUEUE:
            return QueueContents(source, target, id, name, self._copied)
        return TopicContents(source, target, id, name, self._copied)

    def _copied(self, count: int) -> None:
        self._done += count
        self._total = max(self._total, self._done)
        self._progress("copying", self._done, self._total)

    async def _hand_over(self, contents: Contents, name: Name, move_id: uuid.UUID, holder: int, to: int) -> None:
        source, target = self._fleet[holder], self._fleet[to]
        for attempt in range(_HOLD_ATTEMPTS):
            leaving = source.transaction()
            await leaving.start()
            try:
                await source.execute(f"SET LOCAL lock_timeout = '{_HOLD_TIMEOUT}'")
                await contents.hold()
                await source.execute(f"SET LOCAL lock_timeout = '{_ITEM_TIMEOUT}'")
            except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
                await leaving.rollback()
                self._progress("waiting to hold it", self._done, self._total)
                # Who waits behind us goes first.
                await asyncio.sleep(random.uniform(0.05, 0.2) * min(attempt + 1, 10))
                continue
            break
        else:
            raise Overloaded(f"{name} is used by transactions that do not end; nothing was moved, try again later")
        try:
            self._progress("handing over", self._done, self._total)
            async with target.transaction():
                await target.execute(_NOTE, name.kind.value, name.key, holder, move_id, True, None)
                await _begin(target, move_id, name, holder, to)
                await contents.carry(move_id)
            await contents.remove(move_id)
            await source.execute(_NOTE, name.kind.value, name.key, to, move_id, False, contents.left_id)
            await source.execute("UPDATE queen.shard SET version = version + 1")
        except BaseException:
            await leaving.rollback()
            raise
        await leaving.commit()

    async def _forget_attempts(self, name: Name, source: Connection, target: Connection) -> None:
        """Remove what attempts have left that did not come to their end."""
        async with target.transaction():
            rows = await target.fetch("SELECT id FROM queen.moves WHERE kind = $1 AND name = $2", *name)
            for row in rows:
                await target.execute("DELETE FROM queen.move_rows WHERE move_id = $1", row["id"])
            await target.execute("DELETE FROM queen.moves WHERE kind = $1 AND name = $2 AND partitions IS NULL", *name)
            await target.execute(
                "UPDATE queen.placements SET arriving = false, left_id = NULL,"
                " move_id = CASE WHEN arriving THEN NULL ELSE move_id END WHERE kind = $1 AND name = $2",
                *name,
            )
        for row in await target.fetch("SELECT id FROM queen.moves WHERE kind = $1 AND name = $2", *name):
            await remove_leftovers(target, row["id"])
        await source.execute("DELETE FROM queen.moves WHERE kind = $1 AND name = $2 AND partitions IS NULL", *name)

    async def _tidy_up(self, name: Name, to: int) -> None:
        """It is there: have the shard that its hash says know it, and remove what it left behind."""
        chosen = home(name, await self._fleet.layout())
        if chosen != to and chosen in self._fleet.connections:
            async with self._fleet[chosen].transaction():
                await self._fleet[chosen].execute(_NOTE, name.kind.value, name.key, to, None, False, None)
                await self._fleet[chosen].execute("UPDATE queen.shard SET version = version + 1")
        for number, connection in self._fleet.connections.items():
            if number == to:
                continue
            for row in await connection.fetch("SELECT id FROM queen.moves WHERE kind = $1 AND name = $2", *name):
                self._progress("removing what is left behind", 1, 1)
                await remove_leftovers(connection, row["id"])

    async def _refuse_in_maintenance(self, source: Connection, holder: int) -> None:
        if await source.fetchval(
            "SELECT EXISTS (SELECT FROM queen.system_state WHERE key = 'maintenance_mode'"
            " AND (value ->> 'enabled')::boolean)"
        ):
            raise Conflict(f"shard {holder} is in maintenance: pushes wait in spools, so switch it off before a move")

    async def _lock(self, source: Connection, holder: int) -> None:
        if not await source.fetchval("SELECT pg_try_advisory_lock($1)", AdvisoryLock.MOVE):
            raise Conflict(f"something is being moved from shard {holder} already: one move at a time")

    async def _unlock(self, source: Connection) -> None:
        if not source.is_closed():
            await source.execute("SELECT pg_advisory_unlock($1)", AdvisoryLock.MOVE)


async def _begin(connection: Connection, move_id: uuid.UUID, name: Name, holder: int, to: int) -> None:
    await connection.execute(
        "INSERT INTO queen.moves (id, kind, name, from_shard, to_shard) VALUES ($1, $2, $3, $4, $5)",
        move_id,
        name.kind.value,
        name.key,
        holder,
        to,
    )
