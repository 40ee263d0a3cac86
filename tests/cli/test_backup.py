"""Backup and restore: what comes back is what was there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from queen.cli.tools import backup as backup_module
from queen.embedded import EmbeddedPostgres
from tests.cli.conftest import Cli, new_database, serving

PUSH = "(SELECT oid FROM pg_proc WHERE proname = 'push' AND pronamespace = 'queen'::regnamespace)"


@pytest.fixture
def source(postgres: EmbeddedPostgres) -> str:
    return asyncio.run(new_database(postgres))


@pytest.fixture
def target(postgres: EmbeddedPostgres) -> str:
    return asyncio.run(new_database(postgres, template=None))


async def query(dsn: str, text: str) -> Any:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(text)
    finally:
        await connection.close()


def test_everything_comes_back_as_it_was(
    no_server: Cli, source: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    place = ("--database-url", source, "--data-dir", tmp_path / "old" / "data")
    with serving(source, tmp_path / "old") as server:
        monkeypatch.setenv("QUEEN_SERVER", server.url)
        no_server("push", "orders", "--partition", "a", stdin="\n".join(str(n) for n in range(20)))
        no_server("push", "orders", "--data", '"once"', "--transaction-id", "t-1")
        no_server("pop", "orders", "--cg", "g", "--partition", "a", "-n", 7, "--auto-ack")
        no_server("topic", "enqueue", "payments", "refunds", "--data", "1", "--key", "k")
        # What is pushed now lies in the spool: it is part of the backup, and nowhere else.
        no_server("maintenance", "on", "--yes")
        no_server("push", "orders", "--partition", "spooled", stdin="100\n101")
        assert no_server("maintenance", "get").json["bufferedMessages"] == 2
        ran = no_server("backup", tmp_path / "backup", *place)
        assert ran.code == 0, ran.err
        assert ran.json[0]["counts"]["messages"] == 21
        again = no_server("backup", tmp_path / "backup", *place)
        assert (again.code, again.err) == (1, f"queen: {tmp_path / 'backup'} exists; name a directory that does not\n")
        # After the backup: none of it may come back.
        no_server("push", "orders", "--partition", "later", "--data", "1")
    onto = ("--database-url", target, "--data-dir", tmp_path / "new" / "data")
    restored = no_server("restore", tmp_path / "backup", *onto)
    assert restored.code == 0, restored.err
    # Rights of functions are not those of a new database, in which everybody may execute them.
    for role, rights in (("queen_producer", "true"), ("public", "false")):
        for right in (
            f"has_schema_privilege('{role}', 'queen', 'USAGE')",
            f"has_function_privilege('{role}', {PUSH}, 'EXECUTE')",
        ):
            assert str(asyncio.run(query(target, f"SELECT {right}"))).lower() == rights, (role, right)
    with serving(target, tmp_path / "new") as server:
        monkeypatch.setenv("QUEEN_SERVER", server.url)
        assert no_server("maintenance", "get").json["maintenanceMode"] is True
        no_server("maintenance", "off")
        spooled = no_server("pop", "orders", "--partition", "spooled", "--cg", "s", "-n", 5, "--timeout", "30s")
        assert [one["data"] for one in spooled.lines] == [100, 101]
        rest = no_server("pop", "orders", "--cg", "g", "--partition", "a", "-n", 50, "--no-wait")
        assert [one["data"] for one in rest.lines] == list(range(7, 20))
        assert (
            no_server("push", "orders", "--data", "2", "--transaction-id", "t-1", "-o", "json").json["duplicate"] == 1
        )
        assert no_server("topic", "enqueue", "payments", "refunds", "--data", "2", "--key", "k").code == 0
        assert no_server("topic", "describe", "payments", "refunds").json["ready"] == 1
        assert "later" not in [row["name"] for row in no_server("partition", "list", "orders").json]
    occupied = no_server("restore", tmp_path / "backup", *onto)
    assert occupied.code == 1
    assert "--force replaces it" in occupied.err
    assert no_server("restore", tmp_path / "backup", *onto, "--force", "-q", "-o", "json").code == 0


def test_what_is_no_backup_is_refused(no_server: Cli, source: str, target: str, tmp_path: Path) -> None:
    assert "has no manifest.json" in no_server("restore", tmp_path, "--database-url", target).err
    assert "has no Queen schema" in no_server("backup", tmp_path / "b", "--database-url", target).err
    assert not list(tmp_path.glob("b*"))
    assert no_server("backup", tmp_path / "b", "--database-url", "postgresql://x@127.0.0.1:1/x").code == 1
    assert "no database is configured" in no_server("backup", tmp_path / "b", "--data-dir", tmp_path / "none").err
    assert no_server("backup", tmp_path / "b", "--database-url", source, "--no-spool").code == 0
    manifest = tmp_path / "b" / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"schemaVersion": ', '"schemaVersion": 9'))
    assert "is newer; install that version" in no_server("restore", tmp_path / "b", "--database-url", target).err
    manifest.write_text(whole)
    (tmp_path / "b" / "shard-0.dump").unlink()
    assert "is not complete" in no_server("restore", tmp_path / "b", "--database-url", target).err


def test_a_dump_that_fails_leaves_nothing_and_says_why(
    no_server: Cli, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "pg_dump"
    tool.write_text("#!/bin/sh\necho 'pg_dump: error: disk full' >&2\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setattr(backup_module, "find_tool", lambda name, version: tool)
    ran = no_server("backup", tmp_path / "b", "--database-url", source)
    assert ran.code == 1
    assert ran.err == "queen: pg_dump ended with 3: pg_dump: error: disk full\n"
    assert not list(tmp_path.glob("b*"))
    assert (
        asyncio.run(query(source, "SELECT count(*) FROM pg_locks WHERE relation = 'queen.spool_progress'::regclass"))
        == 0
    )


def test_psql_opens_the_database_of_the_server(no_server: Cli, source: str, tmp_path: Path) -> None:
    target = tmp_path / "pushed.csv"
    pushed = "SELECT queen.push('invoices', 'c-7', '{}', transaction_id => 'i-1')"
    ran = no_server("psql", "--database-url", source, "-c", pushed, "-c", f"\\copy ({pushed}) TO '{target}'")
    assert (ran.code, target.read_text()) == (0, "i-1\n")
    assert no_server("psql", "--database-url", source, "-c", "SELECT nothing").code == 1
    assert "there is no shard 1" in no_server("psql", "--database-url", source, "--shard", 1).err
    assert "no database is configured" in no_server("psql").err
