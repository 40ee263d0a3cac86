"""What fails ends in one line with its cause and a remedy, and the remedy works."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.pipelines.running import Runner, in_process
from tests.support.ageing import Connection, age, clean
from tests.support.api import Api


async def test_what_an_archive_cannot_do_is_said_in_a_line_with_its_remedy(
    runner: Runner, api: Api, dsn: str, connection: Connection, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = tmp_path / "archive"
    where = ("--server", api.url, "--data-dir", str(tmp_path / "data"))
    databases = ("--database-url", dsn)

    async def command(*arguments: str) -> tuple[int, str, str]:
        def run() -> tuple[int, str, str]:
            runner.session()
            return in_process(capsys, "pipeline", *arguments, *where)

        return await asyncio.to_thread(run)

    async def refused(said: str, *arguments: str) -> None:
        code, _, err = await command(*arguments)
        assert code == 1
        last = err.strip().splitlines()[-1]
        assert said in last, err
        assert "Traceback" not in err

    archive = ("archive", "orders", "--to", str(root), "--once", *databases)
    lax = runner.file(
        "sources: {orders: {queue: orders, fail_on_data_loss: false}}\nsinks: {out: {from: orders, parquet: DIR/out}}\n"
    )
    await api.configure("orders", retentionEnabled=True, retentionSeconds=60)
    await api.push("orders", 0)
    assert (await command(*archive))[0] == 0
    assert (await command("run", str(lax), "--once", *databases))[0] == 0
    await api.push("orders", 1, 2)
    await age(connection, 100)
    await clean(api)
    await api.push("orders", 3)

    await refused("--no-fail-on-data-loss", *archive)
    code, out, err = await command(*archive, "--no-fail-on-data-loss")
    assert (code, "1 rows read, 1 written" in out) == (0, True), err
    code, out, err = await command("run", str(lax), "--once", *databases)
    assert (code, "1 rows read, 1 written" in out) == (0, True), err
    # All that the queue holds is archived again.
    code, out, err = await command(*archive, "--fresh")
    assert (code, "1 rows read, 1 written" in out) == (0, True), err
    assert len(list(root.glob("queue=orders/**/*.parquet"))) == 3
    await refused("the archive holds no messages of queue 'ordrs'", "replay", str(root), "--queue", "ordrs")
    await refused("there is no queue missing", "dlq-report", "--queue", "missing", *databases)
    for file in root.glob("queue=orders/**/*.parquet"):
        file.write_bytes(b"no Parquet")
    await refused("is not a Parquet file", "replay", str(root), "--to", "copy")
