"""The limit: the same messages written to the same PostgreSQL by a bare asyncpg loop.

No HTTP, no JSON, no dedup: segment rows made in advance, 4 connections, 16 partitions a statement, and
the row that gives out the offsets of each partition. What a server on this PostgreSQL would reach if it
cost nothing itself.

    python -m bench.limit --seconds 5       # on a PostgreSQL of its own
    python -m bench.limit --dsn postgresql://...
"""

import argparse
import asyncio
import hashlib
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from bench.generator import SampleMessage, sample_messages
from bench.postgres import Database, read_settings
from queen.embedded import EmbeddedPostgres

CONNECTIONS = 4
PARTITIONS_PER_STATEMENT = 16
SEGMENT_SIZES = (1, 10, 100, 1000)
SAMPLE_SIZE = 20_000
WARMUP_SECONDS = 0.5

CREATE = """
CREATE SCHEMA bench_limit;
CREATE TABLE bench_limit.partitions (
    partition_id bigint PRIMARY KEY,
    next_offset  bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);
CREATE TABLE bench_limit.segments (
    partition_id bigint NOT NULL,
    base_offset  bigint NOT NULL,
    count        int NOT NULL,
    created_at   timestamptz NOT NULL,
    id_hashes    bytea NOT NULL,
    body         bytea NOT NULL,
    PRIMARY KEY (partition_id, base_offset)
);
ALTER TABLE bench_limit.segments ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE bench_limit.segments ALTER COLUMN id_hashes SET STORAGE EXTERNAL;
"""

WRITE = """
WITH incoming AS (
    SELECT * FROM unnest($1::bigint[], $2::int[], $3::bytea[], $4::bytea[])
        AS t (partition_id, count, id_hashes, body)
), placed AS (
    UPDATE bench_limit.partitions p SET next_offset = p.next_offset + i.count
    FROM incoming i WHERE p.partition_id = i.partition_id
    RETURNING p.partition_id, p.next_offset - i.count AS base_offset
)
INSERT INTO bench_limit.segments (partition_id, base_offset, count, created_at, id_hashes, body)
SELECT i.partition_id, p.base_offset, i.count, now(), i.id_hashes, i.body
FROM incoming i JOIN placed p USING (partition_id)
"""


@dataclass(frozen=True)
class Segment:
    """Messages as one row would hold them."""

    id_hashes: bytes
    body: bytes


@dataclass(frozen=True)
class LimitResult:
    """What the bare loop reached with segments of one size."""

    segment_size: int
    seconds: float
    messages: int
    cpu_s: float

    @property
    def messages_per_s(self) -> float:
        return self.messages / self.seconds


async def measure_limit(database: Database, segment_size: int, seconds: float) -> LimitResult:
    """Writes segments of one size for a while, in a schema that is dropped afterwards."""
    segments = make_segments(sample_messages(max(SAMPLE_SIZE, 20 * segment_size)), segment_size)
    connections = [await database.connect() for _ in range(CONNECTIONS)]
    try:
        await connections[0].execute("DROP SCHEMA IF EXISTS bench_limit CASCADE")
        await connections[0].execute(CREATE)
        await connections[0].execute(
            "INSERT INTO bench_limit.partitions (partition_id) SELECT generate_series(1, $1::int)",
            CONNECTIONS * PARTITIONS_PER_STATEMENT,
        )
        await write_for(connections, segments, segment_size, WARMUP_SECONDS)
        started, cpu = time.perf_counter(), time.process_time()
        messages = await write_for(connections, segments, segment_size, seconds)
        return LimitResult(
            segment_size=segment_size,
            seconds=time.perf_counter() - started,
            messages=messages,
            cpu_s=time.process_time() - cpu,
        )
    finally:
        await connections[0].execute("DROP SCHEMA IF EXISTS bench_limit CASCADE")
        for connection in connections:
            await connection.close()


async def write_for(
    connections: Sequence[asyncpg.Connection], segments: Sequence[Segment], segment_size: int, seconds: float
) -> int:
    deadline = time.perf_counter() + seconds
    counts = await asyncio.gather(
        *(
            write_segments(connection, number, segments, segment_size, deadline)
            for number, connection in enumerate(connections)
        )
    )
    return sum(counts)


async def write_segments(
    connection: asyncpg.Connection,
    number: int,
    segments: Sequence[Segment],
    segment_size: int,
    deadline: float,
) -> int:
    """One connection with partitions of its own, so that the limit knows no waiting for locks."""
    first = number * PARTITIONS_PER_STATEMENT + 1
    partitions = list(range(first, first + PARTITIONS_PER_STATEMENT))
    counts = [segment_size] * PARTITIONS_PER_STATEMENT
    write = await connection.prepare(WRITE)
    supply = itertools.islice(itertools.cycle(segments), number * len(segments) // CONNECTIONS, None)
    written = 0
    while time.perf_counter() < deadline:
        batch = list(itertools.islice(supply, PARTITIONS_PER_STATEMENT))
        await write.fetch(partitions, counts, [s.id_hashes for s in batch], [s.body for s in batch])
        written += segment_size * PARTITIONS_PER_STATEMENT
    return written


def make_segments(messages: Sequence[SampleMessage], size: int) -> list[Segment]:
    starts = range(0, len(messages) - size + 1, size)
    return [make_segment(messages[start : start + size]) for start in starts]


def make_segment(messages: Sequence[SampleMessage]) -> Segment:
    ids = [message.transaction_id.encode() for message in messages]
    hashes = b"".join(hashlib.blake2b(identity, digest_size=8).digest() for identity in ids)
    payloads = [bytes(message.payload) for message in messages]
    return Segment(hashes, b"".join(itertools.chain.from_iterable(zip(ids, payloads, strict=True))))


def main() -> None:
    """Prints the limit for every segment size."""
    description = "What a bare asyncpg loop writes to PostgreSQL: the limit of any server on top of it."
    parser = argparse.ArgumentParser(prog="python -m bench.limit", description=description)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each segment size (5)")
    parser.add_argument("--dsn", help="an existing database, instead of a fresh embedded PostgreSQL")
    options = parser.parse_args()
    if options.dsn:
        asyncio.run(print_limits(Database(options.dsn), options.seconds))
        return
    with own_postgres() as database:
        asyncio.run(print_limits(database, options.seconds))


async def print_limits(database: Database, seconds: float) -> None:
    for name, value in (await read_settings(database)).items():
        print(f"{name} = {value}")
    for size in SEGMENT_SIZES:
        result = await measure_limit(database, size, seconds)
        print(f"segments of {size:>4}: {result.messages_per_s:>9,.0f} msg/s, loop CPU {result.cpu_s:.2f} s")


@contextmanager
def own_postgres() -> Iterator[Database]:
    """A PostgreSQL like the one under a server, with the same settings."""
    with tempfile.TemporaryDirectory(prefix="queen-limit-") as directory:
        Path(directory).chmod(0o755)  # PostgreSQL runs as another user when this runs as root
        with EmbeddedPostgres(Path(directory) / "postgres") as postgres:
            yield Database(postgres.dsn())


if __name__ == "__main__":
    main()
