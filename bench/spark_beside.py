"""How many pushes are left beside a read of Spark's, and beside one that is limited with maxReadShare.

    python -m bench.spark_beside [--messages 2000000] [--share 0.2] [--pushers 4] [--seconds 6] [--turns 5]

Pushers append a message at a time to partitions of another queue, as pushes do, all on this machine. Turns with and
without a read follow each other, so that what else the machine does meets both. Beside the rate stands the share of the
CPU: of the seconds that pushes and read used together, those of the pushes. Pushes alone would have had them all, so it
says the same, and other work on the machine moves it less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psutil
import psycopg
from pyspark.sql import SparkSession

from bench.spark import QUEUE, Setting, _database, _fill_queue, _make_partition, _make_queue, _session
from bench.spark_publish import PUSH
from queen.wire.envelope import Envelope
from queen.wire.ids import IdSource
from queen.wire.segment import pack_segment

PARTITIONS = 8
_WARM_UPS = 3


@dataclass(frozen=True)
class Turn:
    """Pushes a second, their share of the CPU, and rows a second that were read beside them."""

    pushes: float
    share: float
    rows: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--pushers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="queen-bench-beside-"))
    try:
        with _database(directory) as (dsn, jdbc):
            (pid_file,) = directory.rglob("postmaster.pid")
            postmaster = psutil.Process(int(pid_file.read_text().split()[0]))
            setting = Setting(dsn, jdbc, options.messages, PARTITIONS, 2, None)
            pushing = Pushing(dsn, _fill(setting, options.pushers), postmaster)
            spark = _session(setting)
            try:
                # A read that goes on for long is compiled, and so is this.
                for _ in range(_WARM_UPS):
                    _read(spark, setting, 1.0, 0.0)
                _measure(pushing, spark, setting, options)
            finally:
                spark.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _measure(pushing: Pushing, spark: SparkSession, setting: Setting, options: argparse.Namespace) -> None:
    ratios: dict[float, list[float]] = {1.0: [], options.share: []}
    shares: dict[float, list[float]] = {1.0: [], options.share: []}
    for _ in range(options.turns):
        for share in ratios:
            alone = pushing.turn(partial(_wait, options.seconds))
            beside = pushing.turn(partial(_read, spark, setting, share, options.seconds))
            ratios[share].append(beside.pushes / alone.pushes)
            shares[share].append(beside.share)
            print(
                f"maxReadShare {share:<4} {alone.pushes:9,.0f} pushes/s alone, {beside.pushes:9,.0f} beside"
                f" {beside.rows:10,.0f} rows/s: {ratios[share][-1]:.2f}; {beside.share:.2f} of the CPU",
                flush=True,
            )
    for share, found in ratios.items():
        cpu = statistics.median(shares[share])
        print(f"maxReadShare {share:<4} median {statistics.median(found):.2f} of the pushes, {cpu:.2f} of the CPU")


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


class Pushing:
    """Pushers to some partitions, each in a process of its own."""

    def __init__(self, dsn: str, targets: list[int], postmaster: psutil.Process) -> None:
        self._dsn = dsn
        self._targets = targets
        self._postmaster = postmaster

    def turn(self, meanwhile: Callable[[], float]) -> Turn:
        """Push while something else is done."""
        context = multiprocessing.get_context("spawn")
        stopping, counted = context.Event(), context.Queue()
        pushers = [context.Process(target=_push, args=(self._dsn, one, stopping, counted)) for one in self._targets]
        for pusher in pushers:
            pusher.start()
        # Its backend is told by each that is ready.
        own = {counted.get() for _ in pushers} | {pusher.pid for pusher in pushers}
        before = self._cpu(own)
        rows = meanwhile()
        pushes, others = (after - was for after, was in zip(self._cpu(own), before, strict=True))
        stopping.set()
        rate = sum(counted.get() for _ in pushers)
        for pusher in pushers:
            pusher.join()
        return Turn(float(rate), pushes / (pushes + others), rows)

    def _cpu(self, own: set[int | None]) -> tuple[float, float]:
        """Seconds of the pushers and their backends, and of Spark and all else."""
        used = [0.0, 0.0]
        for root in (psutil.Process(), self._postmaster):
            for process in root.children(recursive=True):
                try:
                    times = process.cpu_times()
                except psutil.NoSuchProcess:
                    continue
                spent = times.user + times.system + times.children_user + times.children_system
                used[process.pid not in own] += spent
        return used[0], used[1]


def _push(dsn: str, target: int, stopping: Event, counted: Any) -> None:
    ids, body = IdSource(), Envelope().seal(pack_segment([b'"pushed"'], [b"{}"]))
    with psycopg.connect(dsn, autocommit=True) as connection:
        counted.put(connection.info.backend_pid)
        pushes, began = 0, time.monotonic()
        while not stopping.is_set():
            connection.execute(PUSH, (target, ids.block(1).pack() + bytes(8), body))
            pushes += 1
        counted.put(pushes / (time.monotonic() - began))


if __name__ == "__main__":
    main()
