"""A pipeline that keeps state and has sinks of four kinds is killed, again and again: everything comes once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from queen.pipelines.session import Connection
from queen.wire.pipelines import PipelineState
from tests.pipelines.running import Runner
from tests.support.api import Api
from tests.support.database import Connection as Database
from tests.support.database import stored_messages

EVENTS = 1500
LATE = 7
KEYS = ("a", "b", "c")
_PIPELINE = """\
pipeline: counted
sources:
  events:
    queue: events
    schema: id int, key string, at timestamp
    event_time: at
    lateness: 5 seconds
    rows_per_batch: 300
steps:
  unique: {from: events, dedup: [id, key]}
  counts: {from: unique, tumbling: 10 seconds, by: [key], aggregate: {n: count(*)}}
  shown: {sql: "SELECT unix_timestamp(window_start) AS start, key, n FROM counts"}
sinks:
  copies: {from: unique, queue: copies, partition: key}
  table: {from: unique, postgres: public.copies}
  files: {from: unique, parquet: DIR/files}
  totals: {from: shown, topic: sales/totals}
"""


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_a_stateful_pipeline_writes_to_all_of_its_sinks_once_though_it_is_killed(
    runner: Runner, api: Api, dsn: str, connection: Database, tmp_path: Path
) -> None:
    began = datetime(2026, 1, 1, tzinfo=UTC)
    events = [{"id": n, "key": KEYS[n % 3], "at": (began + timedelta(seconds=n)).isoformat()} for n in range(EVENTS)]
    for start in range(0, EVENTS, 100):
        some = events[start : start + 100]
        # Every event comes twice, not further apart than the lateness.
        await api.push("events", *(event for event in some for _ in range(2)))
    late = [{"id": EVENTS + n, "key": "late", "at": began.isoformat()} for n in range(LATE)]
    await api.push("events", *late, "bad", {"id": -1, "key": "a", "at": "2026-01-02T00:00:00Z"})
    await connection.execute("CREATE TABLE public.copies (id int, key text, at timestamptz)")
    file = runner.file(_PIPELINE)
    for _ in range(4):
        await _run_and_kill(file, api, dsn, connection, tmp_path)
    status = await runner.run(file, Connection(api.url, databases=(dsn,)))
    assert status.state is PipelineState.DONE

    copies = {key: [one.payload for one in await stored_messages(connection, "copies", key)] for key in KEYS}
    assert {key: len(found) for key, found in copies.items()} == dict.fromkeys(KEYS, EVENTS // 3) | {
        "a": EVENTS // 3 + 1
    }
    assert all(len(set(found)) == len(found) for found in copies.values())
    ids = sorted([-1, *range(EVENTS)])
    assert sorted(row["id"] for row in await connection.fetch("SELECT id FROM public.copies")) == ids
    assert sorted(id for (id,) in runner.rows("files", "id")) == ids
    # Two queries leave out repeated events, and late ones with them; one of them writes the dead letters of the source.
    dead = [json.loads(one.payload) for one in await stored_messages(connection, "counted-dead-letters")]
    assert Counter((one["step"], one["offset"]) for one in dead) == {
        ("events", 2 * EVENTS + LATE): 1,
        **{("unique", 2 * EVENTS + n): 2 for n in range(LATE)},
    }
    expected = Counter((n // 10 * 10, KEYS[n % 3]) for n in range(EVENTS))
    items = await _items(api, len(expected))
    assert len(items) == len(expected)
    first = int(began.timestamp())
    assert {(item["start"] - first, item["key"]): item["n"] for item in items} == expected
    assert await connection.fetchval("SELECT count(*) FROM queen.stages") == 0


async def _items(api: Api, most: int) -> list[dict[str, int]]:
    found: list[dict[str, int]] = []
    while True:
        answer = await api.call("GET", "/api/v1/topics/dequeue", namespace="sales", topic="totals", limit=most)
        if not answer.body:
            return found
        found += [item["data"] for item in answer.body]


async def _run_and_kill(file: Path, api: Api, dsn: str, connection: Database, directory: Path) -> None:
    """Until some batches more are published, or one is just being staged."""
    command = ("pipeline", "run", str(file), "--once", "--master", "local[2]", "--server", api.url)
    where = ("--database-url", dsn, "--data-dir", str(directory / "data"), "--conf", "spark.driver.memory=512m")
    driver = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("queen")), *command, *where),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        # Java and Python workers die with it.
        start_new_session=True,
    )
    published = "SELECT coalesce(sum(batch + 1), 0) FROM queen.stage_runs"
    try:
        wanted, staging = await connection.fetchval(published) + random.randint(1, 3), random.random() < 0.5
        while driver.returncode is None:
            if await connection.fetchval(published) >= wanted and (
                not staging or await connection.fetchval("SELECT count(*) FROM queen.stages")
            ):
                break
            await asyncio.sleep(0.005)
    finally:
        if driver.returncode is None:
            os.killpg(driver.pid, signal.SIGKILL)
            await driver.wait()
