"""How many pushes are left beside a read of Spark's, and beside one that is limited with maxReadShare.

    python -m bench.spark_beside [--messages 2000000] [--share 0.2] [--pushers 4] [--seconds 8] [--repeat 1]

Pushers append a message at a time to partitions of another queue, as pushes do, all on this machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psycopg
from pyspark.sql import SparkSession

from bench.spark import QUEUE, Setting, _database, _fill_queue, _make_partition, _make_queue, _session
from bench.spark_publish import PUSH
from queen.wire.envelope import Envelope
from queen.wire.ids import IdSource
from queen.wire.segment import pack_segment

PARTITIONS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--pushers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeat", type=int, default=1, help="turns: on a busy machine, look at several")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="queen-bench-beside-"))
    try:
        with _database(directory) as (dsn, jdbc):
            setting = Setting(dsn, jdbc, options.messages, PARTITIONS, 2, None)
            targets = _fill(setting, options.pushers)
            spark = _session(setting)
            try:
                _read(spark, setting, 1.0, 0.0)
                for _ in range(options.repeat):
                    alone, _ = _pushes(dsn, targets, partial(_wait, options.seconds))
                    print(f"pushes alone                     {alone:9,.0f} a second", flush=True)
                    for share in (1.0, options.share):
                        beside, rows = _pushes(dsn, targets, partial(_read, spark, setting, share, options.seconds))
                        print(
                            f"beside a read, maxReadShare {share:<4} {beside:9,.0f} a second: {beside / alone:.2f} of"
                            f" them; {rows:12,.0f} rows/s are read",
                            flush=True,
                        )
            finally:
                spark.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _fill(setting: Setting, pushers: int) -> list[int]:
    """The messages to be read; returns the partitions to push to."""
    with psycopg.connect(setting.dsn, autocommit=True) as connection:
        _fill_queue(connection, setting)
        target = _make_queue(connection, "pushed")
        return [_make_partition(connection, target, f"p{number}", 0) for number in range(pushers)]


def _wait(seconds: float) -> float:
    time.sleep(seconds)
    return 0.0


def _read(spark: SparkSession, setting: Setting, share: float, seconds: float) -> float:
    """Read the queue, again and again for some seconds; returns rows a second."""
    reader = spark.read.format("queen").options(
        queue=QUEUE, databaseUrls=setting.dsn, maxTasks=setting.cores, maxReadShare=share
    )
    began, rows = time.monotonic(), 0
    while rows == 0 or time.monotonic() - began < seconds:
        reader.load().write.format("noop").mode("overwrite").save()
        rows += setting.messages
    return rows / (time.monotonic() - began)


def _pushes(dsn: str, targets: list[int], meanwhile: Callable[[], float]) -> tuple[float, float]:
    """Pushes a second, while something else is done, and what that returns."""
    context = multiprocessing.get_context("spawn")
    stopping, counted = context.Event(), context.Queue()
    pushers = [context.Process(target=_push, args=(dsn, target, stopping, counted)) for target in targets]
    for pusher in pushers:
        pusher.start()
    for _ in pushers:
        counted.get()
    result = meanwhile()
    stopping.set()
    rate = sum(counted.get() for _ in pushers)
    for pusher in pushers:
        pusher.join()
    return float(rate), result


def _push(dsn: str, target: int, stopping: Event, counted: Any) -> None:
    ids, body = IdSource(), Envelope().seal(pack_segment([b'"pushed"'], [b"{}"]))
    with psycopg.connect(dsn, autocommit=True) as connection:
        counted.put(0)
        pushes, began = 0, time.monotonic()
        while not stopping.is_set():
            connection.execute(PUSH, (target, ids.block(1).pack() + bytes(8), body))
            pushes += 1
        counted.put(pushes / (time.monotonic() - began))


if __name__ == "__main__":
    main()
