"""What there is to tell about shards."""

from __future__ import annotations

from dataclasses import dataclass

from queen.broker.shards.moving.fleet import Fleet
from queen.wire.shards import Kind, Name


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
