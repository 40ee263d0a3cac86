"""A driver that is killed, again and again, at the moments that matter: every window is written once all the same."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from tests.spark.conftest import TOO_SLOW, in_thread
from tests.spark.window_driver import count_windows
from tests.support.api import Api
from tests.support.database import Connection, stored_messages

KEYS = ("a", "b", "c")
SECONDS = 1000
PER_BATCH = 400


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_every_window_is_written_once_though_the_driver_is_killed(
    api: Api, dsn: str, connection: Connection, tmp_path: Path, spark: SparkSession
) -> None:
    await _every_window_is_written_once(api, dsn, connection, tmp_path, spark, kills=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_every_window_is_written_once_though_the_driver_is_killed_twenty_times(
    api: Api, dsn: str, connection: Connection, tmp_path: Path, spark: SparkSession
) -> None:
    await _every_window_is_written_once(api, dsn, connection, tmp_path, spark, kills=20)


async def _every_window_is_written_once(
    api: Api, dsn: str, connection: Connection, tmp_path: Path, spark: SparkSession, kills: int
) -> None:
    seconds = SECONDS * max(1, kills // 2)
    expected: Counter[tuple[int, str]] = Counter()
    for start in range(0, seconds, 1000):
        events = [(second, KEYS[second % 3]) for second in range(start, start + 1000)]
        expected.update((second // 10 * 10, key) for second, key in events)
        await api.push("events", *({"second": second, "key": key} for second, key in events))
    # Only what is long past is closed; this one closes all the others.
    await api.push("events", {"second": seconds + 100_000, "key": "a"})
    for _ in range(kills):
        await _run_and_kill(dsn, tmp_path, connection)
    # The last driver is this process, whose Spark runs already.
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "true")
    try:
        await in_thread(spark, lambda: _finish(spark, dsn, tmp_path))
    finally:
        spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    written = [
        json.loads(message.payload) for key in KEYS for message in await stored_messages(connection, "counts", key)
    ]
    assert Counter((row["start"], row["key"]) for row in written) == Counter(expected.keys())
    assert {(row["start"], row["key"]): row["count"] for row in written} == expected
    assert await connection.fetchval("SELECT count(*) FROM queen.stages") == 0


async def _run_and_kill(dsn: str, tmp_path: Path, connection: Connection) -> None:
    with (tmp_path / "driver.log").open("ab") as output:
        driver = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.spark.window_driver", dsn, str(tmp_path / "checkpoint"), str(PER_BATCH)),
            stdout=output,
            stderr=output,
            cwd=Path(__file__).parents[2],
            # Java and Python workers die with the driver.
            start_new_session=True,
        )
    try:
        await _moment(connection, driver)
    finally:
        if driver.returncode is None:
            os.killpg(driver.pid, signal.SIGKILL)
            await driver.wait()


def _finish(spark: SparkSession, dsn: str, tmp_path: Path, attempts: int = 5) -> None:
    try:
        count_windows(spark, dsn, str(tmp_path / "checkpoint"), str(PER_BATCH))
    except StreamingQueryException as error:
        if attempts == 1 or TOO_SLOW not in str(error):
            raise
        _finish(spark, dsn, tmp_path, attempts - 1)


async def _moment(connection: Connection, driver: asyncio.subprocess.Process) -> None:
    """Wait for a random moment: rows are staged and not published, or published and not noted by Spark yet."""
    before = await _published(connection)
    batches, staged = random.randint(0, 1), random.random() < 0.5
    while driver.returncode is None:
        published = await _published(connection)
        if published >= before + batches + 1 or (
            staged and published >= before + batches and await connection.fetchval("SELECT count(*) FROM queen.stages")
        ):
            break
        await asyncio.sleep(0.005)
    await asyncio.sleep(random.choice((0.0, 0.05 * random.random(), random.random())))


async def _published(connection: Connection) -> int:
    batch: int = await connection.fetchval("SELECT coalesce(max(batch), -1) FROM queen.stage_runs")
    return batch
