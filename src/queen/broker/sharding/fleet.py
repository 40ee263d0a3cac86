"""Connections to all shards, for commands that administer them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg

from queen.errors import DatabaseUnavailable, NotFound, QueenError
from queen.storage.database import UNAVAILABLE_ERRORS, Connection, Record
from queen.storage.shard_setup import check_number
from queen.storage.statements import sql
from queen.wire.shards import Kind, Name

_HOLDERS = {Kind.QUEUE: "shard_queue_id", Kind.TOPIC: "shard_topic_id"}


class Fleet:
    """The shards that can be reached, by number."""

    def __init__(self, connections: dict[int, Connection], count: int) -> None:
        self.connections = connections
        self.count = count

    def __getitem__(self, number: int) -> Connection:
        try:
            return self.connections[number]
        except KeyError:
            if not 0 <= number < self.count:
                raise NotFound(
                    f"there is no shard {number}: DATABASE_URLS names shards 0 to {self.count - 1}"
                ) from None
            raise DatabaseUnavailable(f"shard {number} is unavailable") from None

    def all(self) -> list[Connection]:
        """Every shard. Raises `DatabaseUnavailable` when one of them is unavailable."""
        return [self[number] for number in range(self.count)]

    async def layout(self) -> list[int]:
        """The shards that take new names."""
        for connection in self.connections.values():
            return list(await connection.fetchval(sql("shard_layout")))
        raise DatabaseUnavailable("no shard is available")

    async def placement(self, number: int, name: Name) -> Record | None:
        """The placement of a name, as a shard records it."""
        return await self[number].fetchrow(sql("placement"), name.kind.value, name.key)

    async def holder(self, name: Name) -> tuple[int, int]:
        """The shard that has a queue or topic, and its id there. Raises `NotFound`."""
        for number, connection in sorted(self.connections.items()):
            id = await connection.fetchval(sql(_HOLDERS[name.kind]), name.key)
            if id is not None:
                return number, id
        if len(self.connections) < self.count:
            raise NotFound(f"no available shard has {name}")
        raise NotFound(f"there is no {name}")

    async def complete_arrivals(self) -> None:
        """Finish moves that have left their shard for good."""
        for connection in self.connections.values():
            for row in await connection.fetch(sql("arrivals")):
                if row["shard"] not in self.connections:
                    continue
                placed = await self.placement(row["shard"], Name(Kind(row["kind"]), row["name"]))
                if placed is not None and placed["move_id"] == row["move_id"] and not placed["arriving"]:
                    await connection.fetchval(sql("complete_move"), row["move_id"])


@asynccontextmanager
async def connect_fleet(dsns: Sequence[str]) -> AsyncIterator[Fleet]:
    """Connections to the shards that can be reached; each is checked to be the shard it is configured as."""
    found = await asyncio.gather(*(_connect(dsn) for dsn in dsns))
    connections = {number: connection for number, connection in enumerate(found) if connection is not None}
    try:
        for number, connection in connections.items():
            try:
                stored = await connection.fetchval(sql("shard_number"))
            except asyncpg.UndefinedTableError:
                stored = None
            if stored is None:
                raise QueenError(
                    f"the database that DATABASE_URLS names as shard {number} is not a shard yet: run"
                    " `queen shards add` first"
                )
            check_number(stored, number)
        yield Fleet(connections, len(dsns))
    finally:
        for connection in connections.values():
            await connection.close()


async def _connect(dsn: str) -> Connection | None:
    try:
        return await asyncpg.connect(dsn, timeout=5, server_settings={"application_name": "queen shards"})
    except UNAVAILABLE_ERRORS:
        return None


@dataclass(frozen=True, slots=True)
class ShardView:
    """One shard; `state` is `open`, `closed` (takes no new names) or `unavailable`."""

    number: int
    state: str
    queues: int = 0
    topics: int = 0
    bytes: int = 0
    unfinished: tuple[str, ...] = ()
    """Moves that were begun and not finished."""


async def view_shards(fleet: Fleet) -> list[ShardView]:
    return [await _view(fleet, number) for number in range(fleet.count)]


async def names_on(fleet: Fleet, number: int) -> list[Name]:
    """Every queue and topic that lives on a shard."""
    connection = fleet[number]
    queues = await connection.fetch(sql("shard_queue_names"))
    topics = await connection.fetch(sql("shard_topic_names"))
    return [*(Name.queue(row["name"]) for row in queues), *(Name(Kind.TOPIC, row["name"]) for row in topics)]


async def _view(fleet: Fleet, number: int) -> ShardView:
    connection = fleet.connections.get(number)
    if connection is None:
        return ShardView(number, "unavailable")
    row = await connection.fetchrow(sql("shard_sizes"))
    assert row is not None
    moves = await connection.fetch(sql("unfinished_moves"))
    return ShardView(
        number,
        "open" if row["taking"] else "closed",
        row["queues"],
        row["topics"],
        row["bytes"],
        tuple(dict.fromkeys(str(Name(Kind(one["kind"]), one["name"])) for one in moves)),
    )
