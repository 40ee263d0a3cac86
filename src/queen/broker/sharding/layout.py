"""Which shards take new names: changed in steps, after each of which no two shards would make the same name.

While the layout changes, a new name is made only where the old and the new one agree. Notes of every name that the new
one would look for elsewhere are written before it counts. Whoever dies in between leaves a change that is finished by
asking for it again.
"""

from __future__ import annotations

from collections.abc import Sequence

from queen.broker.sharding.fleet import Fleet
from queen.storage.database import Connection
from queen.wire.shards import Kind, Name, home

_NAMES = (
    (Kind.QUEUE, "SELECT name FROM queen.queues"),
    (
        Kind.TOPIC,
        "SELECT n.name || E'\\n' || t.name AS name FROM queen.topics t"
        " JOIN queen.topic_namespaces n ON n.id = t.namespace_id",
    ),
)
_NOTE = (
    "INSERT INTO queen.placements AS p (kind, name, shard) VALUES ($1, $2, $3)"
    " ON CONFLICT (kind, name) DO UPDATE SET shard = excluded.shard, move_id = NULL WHERE NOT p.arriving"
)


async def change_layout(fleet: Fleet, layout: Sequence[int]) -> None:
    """Have new names made on these shards. All shards have to be there."""
    shards = fleet.all()
    before = await fleet.layout()
    for connection in shards:
        await connection.execute("UPDATE queen.shard SET next_layout = $1, version = version + 1", list(layout))
    await fleet.complete_arrivals()
    notes: dict[int, list[tuple[str, str, int]]] = {}
    for number, connection in enumerate(shards):
        for kind, query in _NAMES:
            for row in await connection.fetch(query):
                name = Name(kind, row["name"])
                chosen = home(name, layout)
                if chosen != number:
                    notes.setdefault(chosen, []).append((kind.value, name.key, number))
    for name, number in (await namespace_homes(fleet, before)).items():
        chosen = home(name, layout)
        if chosen != number:
            notes.setdefault(chosen, []).append((name.kind.value, name.key, number))
    for number, rows in notes.items():
        await shards[number].executemany(_NOTE, rows)
    for connection in shards:
        await connection.execute(
            "UPDATE queen.shard SET layout = $1, next_layout = NULL, version = version + 1", list(layout)
        )


async def namespace_homes(fleet: Fleet, layout: Sequence[int]) -> dict[Name, int]:
    """Where the quotas and keys of namespaces are kept."""
    homes: dict[Name, int] = {}
    for connection in fleet.all():
        for row in await connection.fetch(
            "SELECT name FROM queen.topic_namespaces UNION SELECT namespace FROM queen.topic_key_claims"
        ):
            name = Name.namespace(row["name"])
            if name not in homes:
                homes[name] = await _end_of(fleet, name, home(name, layout))
    return homes


async def move_namespace(fleet: Fleet, name: Name, source: int, target: int) -> None:
    """Have another shard keep the quota and the claims of keys of a namespace."""
    there = fleet[target]
    await _copy_claims(fleet[source], there, name)
    quota = await fleet[source].fetchval(
        "SELECT quota_per_minute FROM queen.topic_namespaces WHERE name = $1", name.key
    )
    await there.execute(
        "INSERT INTO queen.topic_namespaces AS n (name, quota_per_minute) VALUES ($1, $2)"
        " ON CONFLICT (name) DO UPDATE SET quota_per_minute = coalesce(excluded.quota_per_minute, n.quota_per_minute)",
        name.key,
        quota,
    )
    for connection in (there, *(one for one in fleet.all() if one is not there)):
        await connection.execute(_NOTE, name.kind.value, name.key, target)
        await connection.execute("UPDATE queen.shard SET version = version + 1")
    # Those that were made while it was noted.
    await _copy_claims(fleet[source], there, name)


async def _copy_claims(source: Connection, target: Connection, name: Name) -> None:
    await target.executemany(
        "INSERT INTO queen.topic_key_claims (namespace, key, shard, claimed_at) VALUES ($1, $2, $3, $4)"
        " ON CONFLICT DO NOTHING",
        [
            tuple(row)
            for row in await source.fetch(
                "SELECT namespace, key, shard, claimed_at FROM queen.topic_key_claims WHERE namespace = $1"
                " UNION ALL SELECT n.name, k.key, s.number, k.created_at FROM queen.topic_namespaces n"
                " JOIN queen.topic_keys k ON k.namespace_id = n.id CROSS JOIN queen.shard s WHERE n.name = $1",
                name.key,
            )
        ],
    )


async def _end_of(fleet: Fleet, name: Name, shard: int) -> int:
    for _ in range(fleet.count):
        note = await fleet.note(shard, name)
        if note is None or note["shard"] == shard:
            break
        shard = note["shard"]
    return shard
