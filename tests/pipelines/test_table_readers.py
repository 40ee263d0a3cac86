"""Tables in an object store, and as other engines read them. The packages are those of the extra [soak]."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from queen.pipelines.jobs.reconcile import reconcile
from queen.pipelines.tables.locations import Location
from queen.pipelines.tables.opening import Format, open_table
from tests.docs.snippets import Walk
from tests.docs.test_pages import DOCS
from tests.pipelines.running import Runner
from tests.pipelines.test_tables import FORMATS, Lake, rows_at
from tests.support.api import Api
from tests.support.ports import free_port

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


async def test_the_page_about_tables_runs(runner: Runner, api: Api, dsn: str) -> None:
    for package in ("duckdb", "polars"):
        pytest.importorskip(package)
    await api.push("orders", *({"id": n} for n in range(4)))
    for kind, name in ((Format.DELTA, "orders"), (Format.ICEBERG, "orders-iceberg")):
        lake = Lake(kind, runner, api, dsn)
        lake.root = runner.directory / "lake" / name
        await lake.archive("orders")
    walk = Walk(api.url, runner.directory, {"/data/lake": str(runner.directory / "lake")})
    assert await asyncio.to_thread(walk.page, DOCS / "tables.md") == []


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of an S3 on this machine."""
    server = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("s3fs")
    store = server.ThreadedMotoServer(ip_address="127.0.0.1", port=free_port())
    store.start()
    host, port = store.get_host_and_port()
    settings = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="lake")
    yield "s3://lake"
    store.stop()
    # Else the next test would be sent to this store, which has ended.
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.parametrize("kind", FORMATS)
async def test_a_table_in_an_object_store(kind: Format, bucket: str, runner: Runner, dsn: str) -> None:
    root = Location.parse(f"{bucket}/{kind.value}/events")
    catalog = dsn if kind is Format.ICEBERG else None
    script = runner.directory / "driver.py"
    # Spark's workers have the environment of the JVM, which is older than the bucket.
    script.write_text(_DRIVER)
    settings = json.dumps({"root": root.url, "kind": kind.value, "catalog": catalog})
    child = await asyncio.create_subprocess_exec(sys.executable, str(script), settings)
    assert await child.wait() == 0
    table = open_table(kind, root, catalog)
    assert sum(file.rows for file in table.files()) == 60
    assert table.last_batch("writer") == 2
    assert table.compact(2**27, 2).files_after == 3
    assert len(table.vacuum(0, dry_run=False)) >= 6
    assert sum(file.rows for file in table.files()) == 60


_DRIVER = """
import json, sys
from queen.pipelines.session import open_session
from queen.pipelines.tables.files import read_files
from queen.pipelines.tables.locations import Location
from queen.pipelines.tables.opening import Format, open_table
from queen.pipelines.tables.sink import LakeSink

given = json.loads(sys.argv[1])
spark = open_session("objects", "local[2]", {"spark.driver.memory": "512m"})
for batch in (0, 1, 1, 2):
    rows = spark.range(batch * 20, batch * 20 + 20, 1, 2).selectExpr("id % 3 AS part", "id")
    table = open_table(Format(given["kind"]), Location.parse(given["root"]), given["catalog"])
    LakeSink(table, "writer", ["part"])(rows, batch)
files = [(file.url, file.values) for file in table.files()]
ids = [row["id"] for row in read_files(spark, files, "id long").collect()]
assert sorted(ids) == list(range(60)), ids
"""


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("seed", range(3))
async def test_an_archive_that_is_killed_at_any_moment_loses_and_doubles_nothing(
    kind: Format, seed: int, runner: Runner, api: Api, dsn: str
) -> None:
    lake = Lake(kind, runner, api, dsn)
    for n in range(40):
        await api.push("orders", *({"n": n} for n in range(50)), partition=f"p{n % 4}")
    environment = os.environ | {"DATABASE_URLS": dsn, "QUEEN_DATA_DIR": str(runner.directory / "data")}
    command = [str(Path(sys.executable).with_name("queen")), "pipeline", "archive", "orders", "--to", str(lake.root)]
    arguments = ["--format", kind.value, "--rows-per-batch", "50", "--every", "1 ms", "--master", "local[1]"]
    small = ["--server", api.url, "--conf", "spark.driver.memory=512m"]
    child = await asyncio.create_subprocess_exec(
        *command, *arguments, *small, env=environment, start_new_session=True, stderr=asyncio.subprocess.DEVNULL
    )
    chance = random.Random(seed)
    try:
        async with asyncio.timeout(400):
            while len(list((lake.root / "_checkpoints").glob("*/commits/[0-9]*"))) < 2:
                assert child.returncode is None
                await asyncio.sleep(0.05)
        # Anywhere in a batch: while files are written, before the commit, after it.
        await asyncio.sleep(chance.random())
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        await child.wait()
    seen = [(row["partition"], row["offset"]) for row in rows_at(kind, lake.root)]
    assert 0 < len(seen) < 2000
    assert len(set(seen)) == len(seen)
    await lake.archive("orders", rows_per_batch=1000)
    found: list[Any] = sorted((row["partition"], row["offset"]) for row in rows_at(kind, lake.root))
    assert found == sorted((f"p{n}", offset) for n in range(4) for offset in range(500))
    reports = await asyncio.to_thread(reconcile, runner.spark, lake.connection, lake.root)
    assert all(one.whole and not one.behind and one.archived == 500 for one in reports)


async def test_archives_of_one_name_in_two_buckets_have_checkpoints_of_their_own(
    bucket: str, api: Api, dsn: str, tmp_path: Path
) -> None:
    async def archive(root: str, *options: str) -> tuple[int, str, str]:
        child = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).with_name("queen")), "pipeline", "archive", "orders", "--to", root),
            *("--format", "delta", "--once", "--data-dir", str(tmp_path), "--server", api.url, "--database-url", dsn),
            *("--master", "local[1]", "--conf", "spark.driver.memory=512m", *options),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await child.communicate()
        return child.returncode or 0, out.decode(), err.decode()

    await api.push("orders", 0, 1, 2)
    for root in (f"{bucket}/eu/orders", f"{bucket}/us/orders"):
        code, out, err = await archive(root)
        assert (code, "3 rows read, 3 written" in out) == (0, True), err
    files = fsspec.filesystem("s3")
    files.rm("lake/us/orders", recursive=True)
    code, _, err = await archive(f"{bucket}/us/orders")
    assert code == 1
    assert "there is no table at s3://lake/us/orders" in err and "--fresh" in err
    code, out, err = await archive(f"{bucket}/us/orders", "--fresh")
    assert (code, "3 rows read, 3 written" in out) == (0, True), err
