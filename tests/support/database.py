"""The database behind the server's back: what tests arrange in it, and what they find there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import asyncpg

from queen.wire.envelope import Envelope
from queen.wire.ids import IdBlock
from queen.wire.segment import Segment

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


@dataclass(frozen=True)
class Stored:
    """One message as it lies in its partition."""

    offset: int
    id: str
    transaction_id: str
    payload: bytes


async def make_queue(connection: Connection, name: str, **options: object) -> None:
    """A queue with options by the names of their columns, made before any server knows of it."""
    columns = ["name", *options]
    places = ", ".join(f"${number}" for number in range(1, len(columns) + 1))
    await connection.execute(
        f"INSERT INTO queen.queues ({', '.join(columns)}) VALUES ({places})", name, *options.values()
    )


async def expire_leases(connection: Connection, queue: str) -> None:
    """Every lease on the queue has ended, as PostgreSQL sees it. Servers learn of it when they next look."""
    await connection.execute(
        "UPDATE queen.cursors c SET lease_until = clock_timestamp() - interval '1 ms'"
        " FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id"
        " WHERE q.name = $1 AND c.partition_id = p.id AND c.lease_id IS NOT NULL",
        queue,
    )


async def stored_messages(connection: Connection, queue: str, partition: str = "Default") -> list[Stored]:
    """Everything in a partition's log, in order; fails when offsets are not dense."""
    rows = await _segment_rows(connection, queue, partition)
    messages = read_segments(rows)
    assert [message.offset for message in messages] == list(range(len(messages))), "a gap or an overlap"
    if rows:
        times = [row["created_at"] for row in rows]
        assert rows[0]["next_offset"] == len(messages)
        assert rows[0]["last_at"] == times[-1]
        assert times == sorted(times)
    return messages


async def stored_log(connection: Connection, queue: str) -> dict[str, list[Stored]]:
    """What every partition of a queue holds, in order, whatever that is."""
    names = await connection.fetch(
        "SELECT p.name FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = $1", queue
    )
    return {row["name"]: read_segments(await _segment_rows(connection, queue, row["name"])) for row in names}


def read_segments(rows: Sequence[asyncpg.Record]) -> list[Stored]:
    """The messages in segments."""
    messages: list[Stored] = []
    envelope = Envelope()
    for row in rows:
        segment = Segment(
            row["base_offset"], row["created_at"], IdBlock.parse(row["ids"][:16]), envelope.open(row["body"])
        )
        assert segment.count == row["count"] == (len(row["ids"]) - 16) // 8
        messages += [
            Stored(segment.base_offset + index, segment.block.text(index), transaction_id, segment.payload(index))
            for index, transaction_id in enumerate(segment.transaction_ids())
        ]
    return messages


async def _segment_rows(connection: Connection, queue: str, partition: str) -> list[asyncpg.Record]:
    return await connection.fetch(
        "SELECT s.base_offset, s.count, s.created_at, s.ids, s.body, p.next_offset, p.last_at"
        " FROM queen.segments s JOIN queen.partitions p ON p.id = s.partition_id"
        " JOIN queen.queues q ON q.id = p.queue_id"
        " WHERE q.name = $1 AND p.name = $2 ORDER BY s.base_offset",
        queue,
        partition,
    )


async def stored_ids(connection: Connection, queue: str, partition: str = "Default") -> list[str]:
    """The transaction ids in a partition's log, in order."""
    return [message.transaction_id for message in await stored_messages(connection, queue, partition)]


async def dead_letters(connection: Connection, queue: str) -> list[tuple[str, str, int]]:
    """(transaction id, error, retries) of the queue's dead letters, in order of their messages."""
    rows = await connection.fetch(
        "SELECT d.transaction_id, d.error_message, d.retry_count FROM queen.dead_letters d"
        " JOIN queen.queues q ON q.id = d.queue_id WHERE q.name = $1 ORDER BY d.partition_id, d.message_offset",
        queue,
    )
    return [(row["transaction_id"], row["error_message"], row["retry_count"]) for row in rows]
