"""What PostgreSQL holds of a queue: partitions with their segments, and cursors, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.support.database import Connection


@dataclass
class Facts:
    """Partitions, each with its `segments`, and cursors by partition and group."""

    partitions: dict[str, Any] = field(default_factory=dict)
    cursors: dict[tuple[str, str], Any] = field(default_factory=dict)


async def queue_facts(connection: Connection, queue: str) -> Facts:
    found = Facts()
    for row in await connection.fetch(
        "SELECT p.id, p.name, p.floor_offset, p.next_offset FROM queen.partitions p"
        " JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = $1",
        queue,
    ):
        found.partitions[row["name"]] = dict(row) | {"segments": []}
    names = {row["id"]: name for name, row in found.partitions.items()}
    for row in await connection.fetch(
        "SELECT partition_id, base_offset, count, created_at FROM queen.segments"
        " WHERE partition_id = ANY($1::bigint[]) ORDER BY base_offset",
        list(names),
    ):
        found.partitions[names[row["partition_id"]]]["segments"].append(row)
    for row in await connection.fetch(
        "SELECT c.partition_id, g.name, c.committed, c.attempts, c.finished_lease_id::text AS finished,"
        " CASE WHEN c.lease_until > clock_timestamp() THEN c.lease_id::text END AS lease,"
        " c.lease_end FROM queen.cursors c JOIN queen.groups g ON g.id = c.group_id"
        " WHERE c.partition_id = ANY($1::bigint[])",
        list(names),
    ):
        found.cursors[names[row["partition_id"]], row["name"]] = row
    return found
