"""Makes databases the shards of one installation: each gets its number once, and refuses another one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack

import asyncpg

from queen.errors import DatabaseUnavailable, QueenError
from queen.storage.database import (
    UNAVAILABLE_ERRORS,
    AdvisoryLock,
    Connection,
    Database,
    Record,
    unavailable_reason,
)
from queen.storage.statements import sql
from queen.wire.shards import MOST_SHARDS, PARTITION_BITS, SMALL_ID_BITS

log = logging.getLogger(__name__)

ELSEWHERE = "QN001"
"""The state in which a shard refuses a name that lives on another."""
BEING_LAID_OUT = "QN002"
"""The state in which a shard refuses a new name while shards are added or removed."""

# Longer than a server keeps the item ids it has reserved.
_NODES_AFTER_MS = 120_000


async def set_up_shards(dsns: Sequence[str]) -> list[int]:
    """Give every database its shard number; returns the numbers of those that could not be reached.

    All of them have to be there the first time. Databases that join an installation with queues or topics take no new
    names until `queen shards add` says so. Each has to be migrated before.
    """
    if len(dsns) > MOST_SHARDS:
        raise QueenError(f"DATABASE_URLS names {len(dsns)} shards; there can be at most {MOST_SHARDS}")
    try:
        return await _set_up(dsns)
    except UNAVAILABLE_ERRORS as error:
        raise DatabaseUnavailable(
            f"a shard failed while the shards were set up: {unavailable_reason(error)}"
        ) from error


async def _set_up(dsns: Sequence[str]) -> list[int]:
    async with AsyncExitStack() as stack:
        connections = await asyncio.gather(*(_connect(dsn) for dsn in dsns))
        for connection in connections:
            if connection is not None:
                stack.callback(connection.terminate)
        unavailable = [number for number, connection in enumerate(connections) if connection is None]
        reached = {number: connection for number, connection in enumerate(connections) if connection is not None}
        known = {number: row for number, one in reached.items() if (row := await _state(one)) is not None}
        for number, row in known.items():
            check_number(row["number"], number)
        if not known and unavailable:
            raise DatabaseUnavailable(
                f"shard {unavailable[0]} is unavailable, and no other says which there are: the first start needs all"
            )
        layout = await _layout(reached, known)
        if max(layout) >= len(dsns):
            raise QueenError(
                f"shard {max(layout)} is part of this installation, but DATABASE_URLS names only {len(dsns)}: name all"
                " shards, in the order of their numbers"
            )
        for number in sorted(reached.keys() - known.keys()):
            await become_shard(reached[number], number, layout)
        return unavailable


async def become_shard(connection: Connection, number: int, layout: Sequence[int]) -> None:
    """Make a database this shard, unless another session has just done so."""
    async with connection.transaction():
        await connection.execute(sql("shard_lock_setup"), AdvisoryLock.BECOMING_A_SHARD)
        row = await _state(connection)
        if row is not None:
            check_number(row["number"], number)
            return
        if number:
            await _begin_ids(connection, number)
        await connection.execute(sql("shard_remove_other_nodes"), MOST_SHARDS, number)
        await connection.execute(sql("shard_refuse_items"))
        await connection.execute(sql("shard_refuse_traces"))
        await connection.execute(sql("shard_create"), number, list(layout))
    log.info("database is now shard %d (layout %s)", number, list(layout))


async def check_alone(database: Database) -> None:
    """Raises `QueenError` when the only database of a server is one of several shards."""
    try:
        rows = await database.fetch("shard_state")
    except (QueenError, asyncpg.PostgresError) as error:
        log.debug("cannot read the shard number: %s", error)
        return
    if rows and (rows[0]["number"] or len(rows[0]["layout"]) > 1):
        raise QueenError("this database is one of several shards: have DATABASE_URLS name all of them, in their order")


def check_number(stored: int, wanted: int) -> None:
    if stored != wanted:
        raise QueenError(
            f"the database that DATABASE_URLS names as shard {wanted} is shard {stored}: name the shards in the order"
            " of their numbers"
        )


async def _connect(dsn: str) -> Connection | None:
    try:
        return await asyncpg.connect(dsn, timeout=5)
    except UNAVAILABLE_ERRORS as error:
        log.warning("shard is unavailable: %s", unavailable_reason(error))
        return None


async def _state(connection: Connection) -> Record | None:
    return await connection.fetchrow(sql("shard_state"))


async def _layout(reached: dict[int, Connection], known: dict[int, Record]) -> list[int]:
    if known:
        return list(known[min(known)]["layout"])
    return [0] if await _is_used(reached[0]) else sorted(reached)


async def _is_used(connection: Connection) -> bool:
    return bool(await connection.fetchval(sql("shard_is_used")))


async def _begin_ids(connection: Connection, number: int) -> None:
    """Ids that no other shard makes, so that what is moved can keep its own."""
    if await _is_used(connection):
        raise QueenError(
            f"the database for shard {number} has queues or topics already: a new shard has to be an empty database"
        )
    await connection.execute(sql("shard_begin_ids"), number, SMALL_ID_BITS, PARTITION_BITS)
    await connection.execute(sql("shard_close_nodes"), _NODES_AFTER_MS)
