"""How fast Spark copies a queue to a queue, exactly once: rows per second, and what a row costs in CPU time.

    python -m bench.spark_sink [--rows 1000000] [--batch 250000] [--partitions 8] [--ids]

The first micro-batch warms Spark up and does not count. `--ids` copies the transaction ids too, so that every row is
checked against the window. PostgreSQL writes through to the disk, as it does by default.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from pyspark.sql import SparkSession

from bench.postgres import read_postmaster
from queen.embedded import EmbeddedPostgres
from queen.spark.datasource import QueenDataSource
from queen.spark.sink.shard_writer import Shard
from queen.storage.migrate import migrate
from queen.wire.push import PushItem

TEXT = "x" * 140
SEEDED_AT_ONCE = 20_000


@dataclass(frozen=True)
class Copied:
    rows: int
    seconds: float
    cpu: dict[str, float]

    def show(self) -> str:
        shares = ", ".join(f"{name} {seconds * 1e6 / self.rows:.1f}" for name, seconds in sorted(self.cpu.items()))
        total = sum(self.cpu.values()) * 1e6 / self.rows
        return f"{self.rows / self.seconds:,.0f} rows/s; CPU {total:.1f} us a row ({shares})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=250_000)
    parser.add_argument("--partitions", type=int, default=8)
    parser.add_argument("--ids", action="store_true")
    options = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    with tempfile.TemporaryDirectory() as directory, EmbeddedPostgres(Path(directory) / "postgres") as postgres:
        asyncio.run(migrate(postgres.dsn()))
        seed(postgres.dsn(), options.rows + options.batch, options.partitions)
        columns = ["payload", "partition", *(["transaction_id"] if options.ids else [])]
        print(copy(postgres.dsn(), Path(directory), options.batch, columns).show())


def seed(dsn: str, rows: int, partitions: int) -> None:
    shard = Shard(dsn, dedup_window=0)
    run = str(uuid.uuid4())
    begun = time.monotonic()
    for batch, start in enumerate(range(0, rows, SEEDED_AT_ONCE)):
        stager = shard.stager(run, batch, uuid.uuid4())
        stager.add(
            [
                PushItem("source", f"p{n % partitions}", msgspec.Raw(b'{"n":%d,"text":"%b"}' % (n, TEXT.encode())))
                for n in range(start, min(rows, start + SEEDED_AT_ONCE))
            ]
        )
        shard.publish(run, batch, [stager.finish()])
    shard.close()
    print(f"seeded {rows / (time.monotonic() - begun):,.0f} rows/s")


def copy(dsn: str, directory: Path, batch: int, columns: list[str]) -> Copied:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.memory", "768m")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "20000")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(QueenDataSource)
    source = spark.readStream.format("queen").options(
        databaseUrls=dsn, queue="source", startingOffsets="earliest", maxRowsPerBatch=str(batch), maxTasks="2"
    )
    query = (
        source.load()
        .select(*columns)
        .writeStream.format("queen")
        .options(databaseUrls=dsn, queue="copy", checkpointLocation=str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    while not query.recentProgress:
        time.sleep(0.05)
    begun = cpu_seconds(directory)
    query.awaitTermination()
    used = cpu_seconds(directory)
    spent = {name: used[name] - begun.get(name, 0.0) for name in used}
    done = [progress for progress in query.recentProgress[1:] if progress.numInputRows]
    for progress in done:
        print(progress.batchId, progress.numInputRows, progress.durationMs)
    spark.stop()
    return Copied(
        sum(progress.numInputRows for progress in done),
        sum(progress.durationMs["triggerExecution"] for progress in done) / 1000,
        spent,
    )


def cpu_seconds(directory: Path) -> dict[str, float]:
    """CPU time of Java, of Spark's Python processes and of PostgreSQL, each with those that have ended meanwhile."""
    spent: dict[str, float] = {}
    postmaster = psutil.Process(read_postmaster(directory)[0])
    roots = (psutil.Process(), postmaster)
    for process in {one for root in roots for one in (root, *root.children(recursive=True))}:
        try:
            times, name = process.cpu_times(), process.name()
        except psutil.NoSuchProcess:
            continue
        kind = "postgres" if "postgres" in name else "java" if "java" in name else "python"
        spent[kind] = spent.get(kind, 0.0) + times.user + times.system
        if kind != "java":
            spent[kind] += times.children_user + times.children_system
    return spent


if __name__ == "__main__":
    main()
