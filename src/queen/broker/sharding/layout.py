"""The layout: which shards take new names. It changes in steps, after each of which no two shards create the same name.

While it changes, a new name is created only where the old and the new layout agree. Placements of all names that the
new layout would look for on another shard are written before it counts. A change that was interrupted is finished by
running it again.
"""

from __future__ import annotations

from collections.abc import Sequence

from queen.broker.sharding.fleet import Fleet, names_on
from queen.storage.database import Connection
from queen.storage.statements import sql
from queen.wire.shards import Name, home


async def change_layout(fleet: Fleet, layout: Sequence[int]) -> None:
    """Have new names made on these shards. All shards have to be there."""
    shards = fleet.all()
    before = await fleet.layout()
    for connection in shards:
        await connection.execute(sql("layout_prepare"), list(layout))
    await fleet.complete_arrivals()
    placements: dict[int, list[tuple[str, str, int]]] = {}
    for number in range(len(shards)):
        for name in await names_on(fleet, number):
            chosen = home(name, layout)
            if chosen != number:
                placements.setdefault(chosen, []).append((name.kind.value, name.key, number))
    for name, number in (await namespace_homes(fleet, before)).items():
        chosen = home(name, layout)
        if chosen != number:
            placements.setdefault(chosen, []).append((name.kind.value, name.key, number))
    for number, rows in placements.items():
        await shards[number].executemany(sql("layout_placement"), rows)
    for connection in shards:
        await connection.execute(sql("layout_change"), list(layout))


async def namespace_homes(fleet: Fleet, layout: Sequence[int]) -> dict[Name, int]:
    """Where the quotas and keys of namespaces are kept."""
    homes: dict[Name, int] = {}
    for connection in fleet.all():
        for row in await connection.fetch(sql("shard_namespace_names")):
            name = Name.namespace(row["name"])
            if name not in homes:
                homes[name] = await _follow(fleet, name, home(name, layout))
    return homes


async def move_namespace(fleet: Fleet, name: Name, source: int, target: int) -> None:
    """Move the quota and the claims of keys of a namespace to another shard."""
    there = fleet[target]
    await _copy_claims(fleet[source], there, name)
    quota = await fleet[source].fetchval(sql("namespace_quota"), name.key)
    await there.execute(sql("namespace_set_quota"), name.key, quota)
    for connection in (there, *(one for one in fleet.all() if one is not there)):
        await connection.execute(sql("layout_placement"), name.kind.value, name.key, target)
        await connection.execute(sql("move_next_version"))
    # Claims made before every server knew the new placement.
    await _copy_claims(fleet[source], there, name)


async def _copy_claims(source: Connection, target: Connection, name: Name) -> None:
    claims = await source.fetch(sql("namespace_key_claims"), name.key)
    await target.executemany(sql("namespace_save_key_claim"), [tuple(row) for row in claims])


async def _follow(fleet: Fleet, name: Name, shard: int) -> int:
    for _ in range(fleet.count):
        placed = await fleet.placement(shard, name)
        if placed is None or placed["shard"] == shard:
            break
        shard = placed["shard"]
    return shard
