"""Connections to all shards, for whoever looks after them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg

from queen.errors import DatabaseUnavailable, NotFound, QueenError
from queen.storage.database import AWAY_ERRORS, Connection, Record
from queen.storage.shard_setup import check_number
from queen.wire.shards import Kind, Name

_HOLDERS = {
    Kind.QUEUE: "SELECT id FROM queen.queues WHERE name = $1",
    Kind.TOPIC: "SELECT t.id FROM queen.topics t JOIN queen.topic_namespaces n ON n.id = t.namespace_id"
    " WHERE n.name || E'\\n' || t.name = $1",
}
_NOTE = "SELECT shard, move_id, arriving FROM queen.placements WHERE kind = $1 AND name = $2"


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
            raise DatabaseUnavailable(f"shard {number} cannot be reached") from None

    def all(self) -> list[Connection]:
        """Every shard. Raises `DatabaseUnavailable` when one of them is away."""
        return [self[number] for number in range(self.count)]

    async def layout(self) -> list[int]:
        """The shards that take new names."""
        for connection in self.connections.values():
            return list(await connection.fetchval("SELECT layout FROM queen.shard"))
        raise DatabaseUnavailable("no shard can be reached")

    async def note(self, number: int, name: Name) -> Record | None:
        """What a shard says about where a name lives."""
        return await self[number].fetchrow(_NOTE, name.kind.value, name.key)

    async def holder(self, name: Name) -> tuple[int, int]:
        """The shard that has a queue or topic, and its id there. Raises `NotFound`."""
        for number, connection in sorted(self.connections.items()):
            id = await connection.fetchval(_HOLDERS[name.kind], name.key)
            if id is not None:
                return number, id
        if len(self.connections) < self.count:
            raise NotFound(f"no shard that can be reached has {name}")
        raise NotFound(f"there is no {name}")

    async def complete_arrivals(self) -> None:
        """Finish moves that have left their shard for good."""
        for connection in self.connections.values():
            for row in await connection.fetch("SELECT kind, name, shard, move_id FROM queen.placements WHERE arriving"):
                if row["shard"] not in self.connections:
                    continue
                note = await self.note(row["shard"], Name(Kind(row["kind"]), row["name"]))
                if note is not None and note["move_id"] == row["move_id"] and not note["arriving"]:
                    await connection.fetchval("SELECT queen.complete_move($1)", row["move_id"])


@asynccontextmanager
async def connect_fleet(dsns: Sequence[str]) -> AsyncIterator[Fleet]:
    """Connections to those shards that are there, each of which is the one it is named as."""
    found = await asyncio.gather(*(_connect(dsn) for dsn in dsns))
    connections = {number: connection for number, connection in enumerate(found) if connection is not None}
    try:
        for number, connection in connections.items():
            try:
                stored = await connection.fetchval("SELECT number FROM queen.shard")
            except asyncpg.UndefinedTableError:
                stored = None
            if stored is None:
                raise QueenError(
                    f"the database that DATABASE_URLS names as shard {number} is no shard yet: add it first"
                )
            check_number(stored, number)
        yield Fleet(connections, len(dsns))
    finally:
        for connection in connections.values():
            await connection.close()


async def _connect(dsn: str) -> Connection | None:
    try:
        return await asyncpg.connect(dsn, timeout=5, server_settings={"application_name": "queen shards"})
    except AWAY_ERRORS:
        return None


@dataclass(frozen=True, slots=True)
class ShardView:
    """One shard; `state` is `open`, `closed` (takes no new names) or `away`."""

    number: int
    state: str
    queues: int = 0
    topics: int = 0
    bytes: int = 0
    unfinished: tuple[str, ...] = ()
    """Moves that were begun and have not come to their end."""


async def view_shards(fleet: Fleet) -> list[ShardView]:
    return [await _view(fleet, number) for number in range(fleet.count)]


async def names_on(fleet: Fleet, number: int) -> list[Name]:
    """Every queue and topic that lives on a shard."""
    connection = fleet[number]
    queues = await connection.fetch("SELECT name FROM queen.queues ORDER BY name")
    topics = await connection.fetch(
        "SELECT n.name AS namespace, t.name FROM queen.topics t"
        " JOIN queen.topic_namespaces n ON n.id = t.namespace_id ORDER BY 1, 2"
    )
    return [
        *(Name.queue(row["name"]) for row in queues),
        *(Name.topic(row["namespace"], row["name"]) for row in topics),
    ]


async def _view(fleet: Fleet, number: int) -> ShardView:
    connection = fleet.connections.get(number)
    if connection is None:
        return ShardView(number, "away")
    row = await connection.fetchrow(
        "SELECT number = ANY (layout) AS taking, (SELECT count(*) FROM queen.queues) AS queues,"
        " (SELECT count(*) FROM queen.topics) AS topics,"
        " (SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = 'queen' AND c.relkind = 'r')::bigint AS bytes FROM queen.shard"
    )
    assert row is not None
    moves = await connection.fetch("SELECT kind, name FROM queen.moves ORDER BY begun_at")
    return ShardView(
        number,
        "open" if row["taking"] else "closed",
        row["queues"],
        row["topics"],
        row["bytes"],
        tuple(dict.fromkeys(str(Name(Kind(one["kind"]), one["name"])) for one in moves)),
    )
