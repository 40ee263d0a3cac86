"""Cursors under lock: reading them, and writing back what was decided about them."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from typing import TypeAlias

from queen.broker.ack.rules import Cursor, Decision
from queen.errors import Conflict
from queen.log.catalog import Partition, Queue
from queen.log.segments import read_segment
from queen.storage.database import Fetcher
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.segment import MalformedSegment

CursorKey: TypeAlias = tuple[int, int]


async def lock_cursors(
    fetcher: Fetcher, keys: Collection[CursorKey], *, make: Collection[CursorKey]
) -> dict[CursorKey, Cursor]:
    """Lock the cursors of (partition, group) pairs, always in the same order; those in `make` are created if missing.

    A client that names a lease has had a cursor: if it is gone, the group was deleted, and must not come back half.
    """
    ordered = sorted(keys)
    arguments = ([pid for pid, _ in ordered], [gid for _, gid in ordered])
    rows = await fetcher.fetch("lock_cursors", *arguments)
    missing = sorted(set(make) - {(row["partition_id"], row["group_id"]) for row in rows})
    if missing:
        await fetcher.fetch("ensure_cursors", [pid for pid, _ in missing], [gid for _, gid in missing])
        rows = await fetcher.fetch("lock_cursors", *arguments)
    return {
        (row["partition_id"], row["group_id"]): Cursor(
            committed=row["committed"],
            lease_id=row["lease_id"],
            lease_end=row["lease_end"],
            live=bool(row["live"]),
            finished_lease_id=row["finished_lease_id"],
            attempts=row["attempts"],
        )
        for row in rows
    }


async def apply_decisions(
    fetcher: Fetcher,
    envelope: Envelope,
    before: Mapping[CursorKey, Cursor],
    decisions: Mapping[CursorKey, Decision],
    partitions: Mapping[int, Partition],
    queues: Mapping[CursorKey, Queue | None],
) -> dict[CursorKey, int]:
    """Write cursors and dead letters; returns how many messages wait behind each cursor."""
    await _store_dead_letters(fetcher, envelope, decisions, partitions, queues)
    keys = sorted(decisions)
    chosen = [decisions[key] for key in keys]
    rows = await fetcher.fetch(
        "save_cursors",
        [pid for pid, _ in keys],
        [gid for _, gid in keys],
        [decision.cursor.committed for decision in chosen],
        [max(0, decisions[key].cursor.committed - before[key].committed) for key in keys],
        [decision.released for decision in chosen],
        [decision.finished for decision in chosen],
        [decision.wait for decision in chosen],
        [decision.cursor.attempts for decision in chosen],
    )
    return {keys[row["slot"] - 1]: row["available"] for row in rows}


async def _store_dead_letters(
    fetcher: Fetcher,
    envelope: Envelope,
    decisions: Mapping[CursorKey, Decision],
    partitions: Mapping[int, Partition],
    queues: Mapping[CursorKey, Queue | None],
) -> None:
    """Copy messages that are given up on to the dead letters."""
    for key, decision in decisions.items():
        partition_id, group_id = key
        for offset, error, retries in decision.dead:
            await dead_letter(
                fetcher, envelope, partitions[partition_id], group_id, offset, error, retries, queues[key]
            )


async def dead_letter(
    fetcher: Fetcher,
    envelope: Envelope,
    partition: Partition,
    group_id: int,
    offset: int,
    error: str,
    retries: int,
    queue: Queue | None,
) -> bool:
    """Copy one message to the dead letters; False when it is not stored any more."""
    rows = await fetcher.fetch("segment_at", partition.id, offset)
    if not rows:
        return False
    try:
        segment = read_segment(envelope, rows[0])
    except (EnvelopeError, MalformedSegment) as broken:
        raise Conflict(f"a message cannot be read, so it cannot become a dead letter: {broken}") from broken
    index = offset - segment.base_offset
    if index >= segment.count or segment.is_deleted(index):
        return False
    body = envelope.seal(segment.payload(index), encrypt=bool(queue and queue.encryption_enabled))
    await fetcher.fetch(
        "insert_dead_letters",
        [partition.queue_id],
        [partition.id],
        [offset],
        [group_id],
        [uuid.UUID(segment.block.text(index))],
        [segment.transaction_ids()[index].replace("\x00", "\N{REPLACEMENT CHARACTER}")],
        [segment.trace_id(index)],
        [segment.producer(index)],
        [body],
        [error.replace("\x00", "\N{REPLACEMENT CHARACTER}")],
        [retries],
        [segment.created_at],
    )
    return True
