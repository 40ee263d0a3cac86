"""Pipelines over queues: patterns of names, limits of batches, results as they change, declarations on the server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import deltalake
import pytest

from queen.pipelines.errors import DeclarationError
from queen.pipelines.loading import load
from queen.pipelines.session import Connection
from tests.pipelines.running import Runner, in_process
from tests.support.api import Api
from tests.support.database import Connection as Database


@pytest.fixture
def queues(api: Api, dsn: str) -> Connection:
    return Connection(api.url, databases=(dsn,))


async def test_results_are_written_each_time_they_change(
    runner: Runner, api: Api, queues: Connection, connection: Database
) -> None:
    file = runner.file(
        """\
        pipeline: totals
        sources: {clicks: {queue: clicks, rows_per_batch: 2}}
        steps: {totals: {sql: "SELECT partition AS who, sum(int(payload)) AS total FROM clicks GROUP BY partition"}}
        sinks:
          changes: {from: totals, queue: changes, partition: who, mode: update}
          newest: {from: totals, delta: DIR/newest, key: who, mode: update}
        """
    )
    await api.push("clicks", 1, 5, partition="a")
    await api.push("clicks", 1, 2, partition="b")
    await runner.run(file, queues)

    changes = await api.pop("changes", batch=10, partitions=10, autoAck=True)
    assert sorted((message["partition"], message["data"]["total"]) for message in changes) == [
        ("a", 1),
        ("a", 6),
        ("b", 1),
        ("b", 3),
    ]
    newest = deltalake.DeltaTable(str(runner.directory / "newest")).to_pyarrow_table().to_pylist()
    assert {row["who"]: row["total"] for row in newest} == {"a": 6, "b": 3}
    # Each batch is published under the id of its query, so one that is done again is published once.
    assert await connection.fetchval("SELECT max(batch) FROM queen.stage_runs") == 1


async def test_queues_that_match_a_pattern_are_read_and_a_limit_of_bytes_makes_more_batches(
    runner: Runner, api: Api, queues: Connection
) -> None:
    file = runner.file(
        """\
        pipeline: all
        sources:
          orders: {queue_pattern: "orders-.*", bytes_per_batch: 1, min_bytes_per_batch: 1, group: all,
            max_read_share: 0.5, max_tasks: 1}
        sinks: {out: {from: orders, parquet: DIR/out}}
        """
    )
    await api.push("orders-it", 1)
    await api.push("bills", 2)
    await api.push("orders-de", 3)
    status = await runner.run(file, queues)
    assert [(query.batches, query.lag) for query in status.queries] == [(2, 0)]
    assert runner.rows("out", "payload", "queue") == [("1", "orders-it"), ("3", "orders-de")]


_SCHEMA = "n int, d decimal(6,2), s string, at timestamp, day date, l array<int>, b boolean"
_VALUES: dict[str, list[Any]] = {
    "n": [1, "1", 1.0, 1.5, 2**40, True, None],
    "d": [1, 12.345, 12345.678, "1.5", 1e9],
    "s": ["é", 5, 1.50, {"a": [1, None]}, False],
    "at": ["2026-01-01", "2026-01-01T00:00:00+02:00", "2026-01-01T00:00:00.123456Z", "soon", 5],
    "day": ["2026-01-01", "2026-13-01", 5],
    "l": [[1, None], [1, "x"], 1, []],
    "b": [True, "true", 1],
    "other": [{"n": 1}],
}
_PAYLOADS: list[Any] = [{name: value} for name, values in _VALUES.items() for value in values]
_PAYLOADS += [{}, [1], "text", 5, None]


async def test_messages_of_queues_and_lines_of_files_are_parsed_alike(
    runner: Runner, api: Api, queues: Connection
) -> None:
    file = runner.file(
        f"""\
        pipeline: alike
        sources:
          messages: {{queue: events, schema: "{_SCHEMA}"}}
          lines: {{files: DIR/in, schema: "{_SCHEMA}"}}
        sinks:
          of_queue: {{from: messages, parquet: DIR/of_queue}}
          of_files: {{from: lines, parquet: DIR/of_files}}
        dead_letters: {{parquet: DIR/dead}}
        """
    )
    await api.push("events", *_PAYLOADS)
    runner.batch(*map(json.dumps, _PAYLOADS))
    await runner.run(file, queues)
    columns = [field.split()[0] for field in _SCHEMA.split(", ")]
    of_queue, of_files = (runner.rows(name, *columns) for name in ("of_queue", "of_files"))
    assert of_queue == of_files
    dead = [(step, json.loads(record)) for step, record in runner.rows("dead", "step", "record")]
    refused = {step: sorted((one for name, one in dead if name == step), key=repr) for step, _ in dead}
    assert refused["messages"] == refused["lines"]
    assert len(of_queue) + len(refused["lines"]) == len(_PAYLOADS)


async def test_a_pipeline_that_was_declared_on_the_server_is_run_by_its_name(
    runner: Runner, api: Api, dsn: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    manifest = tmp_path / "queen.yaml"
    manifest.write_text(
        "kind: Pipeline\nname: kept\nsources: {clicks: {queue: clicks}}\n"
        "steps: {odd: {sql: 'SELECT int(payload) AS n FROM clicks WHERE int(payload) % 2 = 1'}}\n"
        "sinks: {copy: {from: odd, queue: odd}}\n"
    )
    await api.push("clicks", *range(5))

    def command(*arguments: str) -> tuple[int, str, str]:
        runner.session()
        return in_process(capsys, *arguments)

    where = ("--server", api.url, "--database-url", dsn, "--data-dir", str(tmp_path / "data"))
    code, _, err = await asyncio.to_thread(command, "apply", "-f", str(manifest), "--server", api.url)
    assert (code, err) == (0, "")
    code, out, err = await asyncio.to_thread(command, "pipeline", "run", "kept", "--once", *where)
    assert code == 0, err
    assert "pipeline 'kept' is done: 5 rows read, 2 written, 0 dead letters" in out
    odd = await api.pop("odd", batch=10, autoAck=True)
    assert [message["data"] for message in odd] == [{"n": 1}, {"n": 3}]
    code, _, err = await asyncio.to_thread(command, "pipeline", "run", "kpet", "--once", *where)
    assert code == 1
    assert "there is no file kpet, and no pipeline of that name was declared; there are: kept" in err
    code, out, _ = await asyncio.to_thread(command, "pipeline", "status", "kept", "--json", *where[4:])
    assert json.loads(out)["file"] == str(tmp_path / "data" / "pipelines" / "kept" / "declared.yaml")


@pytest.mark.parametrize(
    ("source", "sink", "said"),
    [
        ("queue_pattern: 'orders-['", "console: true", "'queue_pattern' is not a regular expression: 'orders-['"),
        ("queue: q, max_delay: 1m", "console: true", "give that as well"),
        ("queue: q, min_rows_per_batch: 2, max_delay: soon", "console: true", "max_delay: 'soon' is not a length"),
        ("queue: q, min_rows_per_batch: 9, rows_per_batch: 2", "console: true", "(9) must not be above"),
        ("queue: q, min_bytes_per_batch: 9, bytes_per_batch: 2", "console: true", "(9) must not be above"),
        ("queue: q, bytes_per_batch: none", "console: true", "'bytes_per_batch' must be a whole number above 0"),
        ("queue: q, max_read_share: 1.5", "console: true", "'max_read_share' must be a share of the machine from"),
        ("queue: q, max_read_share: half", "console: true", "from 0.01 to 1, not 'half'"),
        ("queue: q, max_tasks: 0", "console: true", "'max_tasks' must be a whole number above 0"),
        ("files: d, schema: n int, max_read_share: 0.5", "console: true", "unknown 'max_read_share'"),
        ("queue: q", "queue: out, mode: updated", "unknown 'updated'; did you mean 'update'?"),
        ("queue: q", "postgres: t, mode: update", "mode update needs 'key'"),
        ("queue: q", "parquet: /tmp/x, mode: update", "unknown 'mode'"),
        ("queue: q", "delta: /tmp/x, mode: update", "mode update needs 'key'"),
        ("queue: q", "parquet: 's3://lake/x'", "in an object store use delta"),
        ("queue: q", "iceberg: 'ftp://lake/x'", "expected a directory, or a URL that begins with s3://"),
    ],
)
def test_what_is_wrong_with_limits_and_modes_is_said(tmp_path: Path, source: str, sink: str, said: str) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(f"sources: {{a: {{{source}}}}}\nsinks: {{s: {{from: a, {sink}}}}}\n")
    with pytest.raises(DeclarationError) as refused:
        load(file)
    assert said in str(refused.value)
