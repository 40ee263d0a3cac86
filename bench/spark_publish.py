"""For how long pushes wait while a large batch of Spark's is published to the same partitions.

    python -m bench.spark_publish [--rows 1000000] [--partitions 8] [--ids] [--repeat 3]

Rows are staged as tasks of a write stage them, and published as the driver does. Meanwhile a thread appends a message
to one partition after the other, as a push does; its slowest append is the stall. `--ids` gives transaction ids, so
that every row is checked against the window.

PostgreSQL has WAL files to reuse, as it has after its first checkpoints. Where it has none it creates one for every
16 MB that are written, and every commit, in any database, waits for that: tens of milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import tempfile
import threading
import time
import uuid
from pathlib import Path

import msgspec
import psycopg

from queen.embedded import EmbeddedPostgres
from queen.log.stages import Attempt
from queen.spark.sink.shard_writer import Shard
from queen.storage.migrate import migrate
from queen.wire.envelope import Envelope
from queen.wire.ids import IdSource
from queen.wire.push import PushItem
from queen.wire.segment import pack_segment

NOISE_BYTES = 70
WAL_FILES = 32
STAGED_AT_ONCE = 20_000
PUSH = """
WITH moved AS (
    UPDATE queen.partitions p SET next_offset = p.next_offset + 1, last_at = greatest(p.last_at, clock_timestamp())
    WHERE p.id = %s RETURNING p.id, p.next_offset, p.last_at
)
INSERT INTO queen.segments (partition_id, base_offset, count, created_at, ids, body)
SELECT m.id, m.next_offset - 1, 1, m.last_at, %s, %s FROM moved m
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--partitions", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ids", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, EmbeddedPostgres(Path(directory) / "postgres") as postgres:
        asyncio.run(migrate(postgres.dsn()))
        shard = Shard(postgres.dsn(), dedup_window=3600)
        run = str(uuid.uuid4())
        for batch in range(options.repeat):
            attempt = stage(shard, run, batch, options)
            leave_wal_files(postgres.dsn())
            with Pushes(postgres.dsn()) as pushes:
                begun = time.monotonic()
                published = shard.publish(run, batch, [attempt])
                seconds = time.monotonic() - begun
            assert published.messages == options.rows, published
            print(f"published {options.rows:,} rows in {seconds:.2f} s; {pushes.show()}", flush=True)
        shard.close()


def stage(shard: Shard, run: str, batch: int, options: argparse.Namespace) -> Attempt:
    stager = shard.stager(run, batch, uuid.uuid4())
    for start in range(0, options.rows, STAGED_AT_ONCE):
        stager.add(
            [
                PushItem(
                    "target",
                    f"p{n % options.partitions}",
                    msgspec.Raw(b'{"n":%d,"text":"%b"}' % (n, secrets.token_hex(NOISE_BYTES).encode())),
                    f"{batch}-{n}" if options.ids else "",
                )
                for n in range(start, min(options.rows, start + STAGED_AT_ONCE))
            ]
        )
    return stager.finish()


def leave_wal_files(dsn: str) -> None:
    """Have PostgreSQL keep used WAL files to be reused: as many as `min_wal_size` allows."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(WAL_FILES):
            connection.execute("SELECT pg_logical_emit_message(false, 'bench', ''), pg_switch_wal()")
        connection.execute("CHECKPOINT")


class Pushes:
    """Appends messages to one partition of the target after the other, until it is left."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._push)
        self._waits: list[float] = []

    def __enter__(self) -> Pushes:
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._stopping.set()
        self._thread.join()

    def show(self) -> str:
        waits = sorted(self._waits)
        return (
            f"{len(waits)} pushes beside it, median {waits[len(waits) // 2] * 1000:.1f} ms,"
            f" slowest {', '.join(f'{wait * 1000:.0f}' for wait in waits[-3:])} ms"
        )

    def _push(self) -> None:
        ids = IdSource()
        body = Envelope().seal(pack_segment([b'"pushed"'], [b"{}"]))
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            found = connection.execute("SELECT id FROM queen.partitions ORDER BY id").fetchall()
            while not self._stopping.is_set():
                for (partition,) in found:
                    begun = time.monotonic()
                    connection.execute(PUSH, (partition, ids.block(1).pack() + bytes(8), body))
                    self._waits.append(time.monotonic() - begun)


if __name__ == "__main__":
    main()
