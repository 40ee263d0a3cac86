"""What was pushed is in the archive, once and as it was, whatever is killed; and comes back from it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from pyspark.sql import Row

from queen.errors import QueenError
from queen.pipelines.archive_files import reading
from queen.pipelines.declaration import ONCE
from queen.pipelines.errors import AlreadyRunning, ArchiveError, PipelineError
from queen.pipelines.jobs.archive import archive_declaration, sole_archiver
from queen.pipelines.jobs.compact import compact
from queen.pipelines.jobs.reconcile import PartitionReport, reconcile
from queen.pipelines.jobs.replay import Replayed, ReplayOptions, ReplayReport, _paced, replay
from queen.pipelines.manifest import Manifest
from queen.pipelines.session import Connection
from queen.pipelines.sinks import writer_of
from queen.pipelines.state import StateDirectory
from queen.wire.pipelines import PipelineState, PipelineStatus, read_status, write_status
from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, issue
from tests.pipelines.running import Runner
from tests.support.api import Api
from tests.support.database import Connection as Database


class Archiving:
    """An archive of the test's queues."""

    def __init__(self, runner: Runner, api: Api, dsn: str) -> None:
        self.runner = runner
        self.api = api
        self.root = runner.directory / "archive"
        self.connection = Connection(api.url, databases=(dsn,))

    async def archive(self, *queues: str, rows_per_batch: int = 100_000) -> PipelineStatus:
        declaration = archive_declaration(queues, self.root, ONCE, rows_per_batch, group="archive")
        with sole_archiver(self.root) as checkpoints:
            return await self.runner.run(declaration, self.connection, checkpoints=checkpoints)

    async def reconcile(self, *queues: str) -> dict[str, PartitionReport]:
        reports = await asyncio.to_thread(reconcile, self.runner.spark, self.connection, self.root, queues)
        return {f"{report.queue}/{report.partition}": report for report in reports}

    async def replay(self, **options: Any) -> Replayed:
        given = ReplayOptions(self.root, **options)
        return await asyncio.to_thread(replay, self.runner.spark, self.connection, given)

    def plain(self) -> list[tuple[str, int]]:
        """Partition and offset of every message that a reader of the plain directory sees."""
        files = [file for file in self.root.rglob("*.parquet") if not _hidden(file.relative_to(self.root))]
        rows = [row for file in files for row in pyarrow.parquet.read_table(file, partitioning=None).to_pylist()]
        return sorted((row["partition"], row["offset"]) for row in rows)


def _hidden(path: Path) -> bool:
    return any(part.startswith("_") for part in path.parts)


@pytest.fixture
def archiving(runner: Runner, api: Api, dsn: str) -> Archiving:
    return Archiving(runner, api, dsn)


async def test_an_archive_holds_every_message_and_column_once_and_gives_them_back(archiving: Archiving) -> None:
    api = archiving.api
    await api.push("orders", {"n": 1, "name": "é"}, {"n": 2}, partition="a", ids=["one", "two"])
    await api.push("orders", [3], "text", None, partition="b")
    await api.push("007", {"n": 0})
    status = await archiving.archive("orders", "007", rows_per_batch=4)
    (query,) = status.queries
    assert (query.rows, query.written, query.lag) == (6, 6, 0)
    assert query.batches > 1
    # Nothing new: nothing changes. Something new: that alone is added.
    await archiving.archive("orders", "007")
    await api.push("orders", {"n": 5}, partition="a")
    await archiving.archive("orders", "007")
    assert archiving.plain() == [("Default", 0), *(("a", n) for n in range(3)), *(("b", n) for n in range(3))]
    folders = {str(file.relative_to(archiving.root).parent) for file in archiving.root.glob("queue=*/**/*.parquet")}
    now = datetime.now(UTC)
    today = {f"date={moment:%Y-%m-%d}/hour={moment:%H}" for moment in (now, now - timedelta(minutes=5))}
    assert {folder.partition("/")[2] for folder in folders} <= today
    assert {folder.partition("/")[0] for folder in folders} == {"queue=orders", "queue=007"}

    reports = await archiving.reconcile()
    assert {name: (report.pushed, report.archived, report.whole) for name, report in reports.items()} == {
        "007/Default": (1, 1, True),
        "orders/a": (3, 3, True),
        "orders/b": (3, 3, True),
    }
    assert all(report.queue_checksum == report.archive_checksum for report in reports.values())

    done = await archiving.replay(queues=("orders",), to="copy")
    assert (done.queued, done.duplicates, done.queues) == (6, 0, {"copy"})
    again = await archiving.replay(queues=("orders",), to="copy")
    assert (again.queued, again.duplicates) == (0, 6)
    popped = await api.pop("copy", "a", batch=10, autoAck=True)
    assert [(message["transactionId"], message["data"]) for message in popped[:2]] == [
        ("one", {"n": 1, "name": "é"}),
        ("two", {"n": 2}),
    ]
    assert [message["data"] for message in await api.pop("copy", "b", batch=10, autoAck=True)] == [[3], "text", None]


async def test_messages_keep_their_producer(runner: Runner, start_server: StartServer, dsn: str) -> None:
    api = await start_server(jwt_enabled=True, jwt_secret=SECRET)
    admin, other = (api.bearing(issue(role, sub=name)) for role, name in (("admin", "alice"), ("read-write", "bob")))
    for number, caller in enumerate((admin, other, other, admin, other)):
        await caller.push("orders", number)
    archiving = Archiving(runner, admin, dsn)
    archiving.connection = Connection(api.url, token=issue("admin", sub="carol"), databases=(dsn,))
    await archiving.archive("orders")
    await archiving.replay(queues=("orders",), to="copy")
    await archiving.replay(queues=("orders",), to="mine", keep_producers=False)
    noted = {
        queue: [(message["data"], message["producerSub"]) for message in await admin.pop(queue, batch=10)]
        for queue in ("copy", "mine")
    }
    names = ("alice", "bob", "bob", "alice", "bob")
    assert noted == {"copy": list(enumerate(names)), "mine": [(number, "carol") for number in range(5)]}
    archiving.connection = Connection(api.url, token=issue("read-write", sub="bob"), databases=(dsn,))
    with pytest.raises(QueenError, match="producerSub in the query needs a token with the role admin"):
        await archiving.replay(queues=("orders",), to="another")
    for caller in (admin, other):
        await caller.close()


async def test_a_replay_takes_a_stretch_of_time_and_what_passes_a_filter(archiving: Archiving) -> None:
    api = archiving.api
    await api.push("orders", *({"n": n} for n in range(10)), partition="a")
    await api.push("orders", {"n": 100}, partition="a")
    await archiving.archive("orders")
    (first, *_, last) = sorted(
        row["created_at"]
        for file in archiving.root.glob("queue=*/**/*.parquet")
        for row in pyarrow.parquet.read_table(file, partitioning=None).to_pylist()
    )
    assert first < last
    options: dict[str, Any] = {"to": "copy", "until": last, "condition": "get_json_object(payload, '$.n') % 2 = 0"}
    assert (await archiving.replay(**options)).queued == 5
    # Slower than the wind: the messages came within moments, so nobody waits.
    assert (await archiving.replay(**options, new_ids=True, speed=0.5)).queued == 5
    assert (await archiving.replay(to="copy", since=last + timedelta(seconds=1))).queued == 0
    values = [message["data"]["n"] for message in await api.pop("copy", "a", batch=100, autoAck=True)]
    assert values == [0, 2, 4, 6, 8] * 2
    with pytest.raises(PipelineError, match="--filter nothing = 1"):
        await archiving.replay(condition="nothing = 1")


async def test_reconcile_tells_what_is_missing_different_doubled_and_not_there_yet(archiving: Archiving) -> None:
    api = archiving.api
    for partition in ("missing", "different", "doubled", "behind", "fine"):
        await api.push("orders", *({"n": n} for n in range(4)), partition=partition)
    await archiving.archive("orders")
    await api.push("orders", {"n": 4}, partition="behind")
    await api.push("orders", {"n": 0}, partition="new")
    for file in archiving.root.glob("queue=*/**/*.parquet"):
        table = pyarrow.parquet.read_table(file, partitioning=None)
        rows = [changed for row in table.to_pylist() for changed in _tampered(row)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=table.schema), file)
    reports = await archiving.reconcile()
    found = {
        name.partition("/")[2]: (one.pushed, one.archived, one.missing, one.different, one.doubled, one.behind)
        for name, one in reports.items()
    }
    assert found == {
        "missing": (4, 3, 1, 0, 0, 0),
        "different": (4, 4, 0, 1, 0, 0),
        "doubled": (4, 4, 0, 0, 1, 0),
        "behind": (5, 4, 0, 0, 0, 1),
        "new": (1, 0, 0, 0, 0, 1),
        "fine": (4, 4, 0, 0, 0, 0),
    }
    assert reports["orders/missing"].first_missing == 1
    assert {name for name, one in reports.items() if not one.whole} == {
        "orders/missing",
        "orders/different",
        "orders/doubled",
    }


def _tampered(row: dict[str, Any]) -> Sequence[dict[str, Any]]:
    if row["offset"] != 1:
        return [row]
    match row["partition"]:
        case "missing":
            return []
        case "different":
            return [row | {"payload": '{"n":17}'}]
        case "doubled":
            return [row, row]
    return [row]


async def test_small_files_are_joined_and_the_messages_stay(archiving: Archiving, connection: Database) -> None:
    api = archiving.api
    # A message of some hours ago: its hour is over.
    await api.push("orders", {"n": -1}, partition="old")
    await connection.execute("UPDATE queen.segments SET created_at = created_at - interval '5 hours'")
    for n in range(2):
        await api.push("orders", {"n": n}, partition="a")
        await archiving.archive("orders")
    before = Manifest(archiving.root).snapshot()
    assert len([file for file in before.files if file.rows]) >= 3
    compact(archiving.root)
    done = compact(f"file://{archiving.root}", running_hour=True)
    after = Manifest(archiving.root).snapshot()
    assert after.rows == before.rows == 3
    assert done.files_after < done.files_before
    assert archiving.plain() == [("a", 0), ("a", 1), ("old", 0)]
    assert all(report.whole for report in (await archiving.reconcile()).values())
    # The archive goes on after it.
    await api.push("orders", {"n": 2}, partition="a")
    await archiving.archive("orders")
    assert ("a", 2) in archiving.plain()
    # Files that somebody reads stay in place.
    with Manifest(archiving.root).reading() as held:
        assert all((archiving.root / file.path).exists() for file in held.files)


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_an_archive_that_is_killed_loses_and_doubles_nothing(archiving: Archiving, dsn: str) -> None:
    api = archiving.api
    for n in range(40):
        await api.push("orders", *({"n": n} for n in range(50)), partition=f"p{n % 4}")
    environment = os.environ | {"DATABASE_URLS": dsn, "QUEEN_DATA_DIR": str(archiving.runner.directory / "data")}
    command = [
        str(Path(sys.executable).with_name("queen")),
        "pipeline",
        "archive",
        "orders",
        "--to",
        str(archiving.root),
    ]
    arguments = ["--rows-per-batch", "50", "--every", "1 ms", "--master", "local[1]", "--server", api.url]
    small = ["--conf", "spark.driver.memory=512m", "--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"]
    child = await asyncio.create_subprocess_exec(
        *command, *arguments, *small, env=environment, start_new_session=True, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        # In the middle of it: some batches are there, and others are not.
        async with asyncio.timeout(400):
            while len(list((archiving.root / "_manifest").glob("*.json"))) < 3:
                assert child.returncode is None
                await asyncio.sleep(0.05)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        await child.wait()
    seen = archiving.plain()
    assert 0 < len(seen) < 2000
    assert len(set(seen)) == len(seen)
    assert archiving.runner.state.status("archive-archive").error == "its process was killed"
    await archiving.archive("orders", rows_per_batch=1000)
    assert archiving.plain() == sorted((f"p{n}", offset) for n in range(4) for offset in range(500))
    reports = await archiving.reconcile()
    assert all(one.whole and not one.behind and one.archived == 500 for one in reports.values())


async def test_two_archivers_of_one_archive_are_one_too_many(tmp_path: Path) -> None:
    with sole_archiver(tmp_path / "archive"), pytest.raises(AlreadyRunning, match="another process archives"):
        sole_archiver(tmp_path / "archive").__enter__()


def test_archives_of_directories_of_one_name_have_names_of_their_own(tmp_path: Path) -> None:
    states = StateDirectory(tmp_path / "data")
    names = []
    for root in ("/eu/orders", "/us/orders", "/eu/orders", f"/long/{'x' * 80}", f"/other/{'x' * 80}"):
        declaration = archive_declaration(["orders"], root, ONCE, 1, None, states=states)
        names.append(declaration.name)
        with states.running(declaration.name) as directory:
            status = PipelineStatus(
                name=declaration.name,
                state=PipelineState.DONE,
                pid=os.getpid(),
                file=root,
                master="local",
                started_at=time.time(),
                updated_at=time.time(),
            )
            write_status(directory, status)
    assert names[0] == names[2] == "archive-orders"
    assert names[1].startswith("archive-orders-")
    assert len(set(names)) == 4 and max(map(len, names)) == 64


def test_an_archive_that_was_moved_goes_on_as_the_writer_it_was(tmp_path: Path) -> None:
    assert writer_of("archive", "archive-orders", tmp_path) == writer_of("archive", "archive-moved", tmp_path)
    (tmp_path / "queen-writer").write_text("0" * 32)
    assert writer_of("archive", "archive-orders", tmp_path) == f"archive-orders.archive.{'0' * 32}"


async def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="is not an archive; make one with"):
        compact(tmp_path)
    Manifest(tmp_path).create()
    with reading(f"file://{tmp_path}") as view:
        assert view.queues() == []


def test_a_replay_reports_how_far_it_is(tmp_path: Path) -> None:
    report = ReplayReport(tmp_path, ReplayOptions(Path("/data/archive"), to="copy"), "local[*]", 10)
    begun = read_status(tmp_path)
    assert begun is not None and begun.state is PipelineState.RUNNING
    assert (begun.name, begun.queries[0].name, begun.queries[0].lag) == (tmp_path.name, "copy", 10)
    report.end(Replayed(queued=6, duplicates=2), "the queue is full")
    failed = read_status(tmp_path)
    assert failed is not None and (failed.state, failed.error) == (PipelineState.FAILED, "the queue is full")
    assert (failed.queries[0].rows, failed.queries[0].written, failed.queries[0].lag) == (8, 6, 2)
    report.end(Replayed(queued=8, duplicates=2))
    done = read_status(tmp_path)
    assert done is not None and (done.state, done.error, done.queries[0].lag) == (PipelineState.DONE, None, 0)


def test_a_replay_pushes_no_more_at_once_than_a_server_takes() -> None:
    now = datetime.now(UTC)
    sizes = [1_000_000] * 9 + [20_000_000, 20_000_000] + [10] * 2500
    rows = [Row(created_at=now, producer_sub=None, payload="x" * size) for size in sizes]
    for speed in (None, 1e9):
        chunks = list(_paced(iter(rows), speed, by_producer=True))
        assert [row for chunk in chunks for row in chunk] == rows
        assert [len(chunk) for chunk in chunks] == [4, 4, 1, 1, 1, 1000, 1000, 500]
