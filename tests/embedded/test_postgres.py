"""The embedded PostgreSQL keeps what it was given, whatever happens to it or to the Queen that started it."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg
import psutil
import pytest

from queen.embedded import EmbeddedPostgres, EmbeddedPostgresError
from queen.embedded.account import Account, check_owner
from queen.embedded.errors import failure

# Starts a server as `queen serve` would, tells its process id, and waits to be killed.
STARTER = """
import sys, time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from queen.embedded import EmbeddedPostgres
postgres = EmbeddedPostgres(Path(sys.argv[1]))
postgres.start()
print(postgres.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(tmp_path_factory.mktemp("running") / "pg") as postgres:
        yield postgres


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


async def store(postgres: EmbeddedPostgres, number: int) -> None:
    async with connected(postgres.dsn()) as connection:
        await connection.execute("CREATE TABLE IF NOT EXISTS kept (number integer)")
        await connection.execute("INSERT INTO kept VALUES ($1)", number)


async def stored(postgres: EmbeddedPostgres) -> list[int]:
    async with connected(postgres.dsn()) as connection:
        return [row["number"] for row in await connection.fetch("SELECT number FROM kept ORDER BY number")]


def start_elsewhere_and_kill_the_starter(data_dir: Path) -> int:
    """A server whose Queen was ended by kill -9; gives the server's process id."""
    with subprocess.Popen([sys.executable, "-c", STARTER, str(data_dir)], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        starter.kill()
    return pid


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("server_version_num", "18"),
        ("server_encoding", "UTF8"),
        ("data_checksums", "on"),
        ("fsync", "on"),
        ("synchronous_commit", "on"),
        ("full_page_writes", "on"),
        ("max_wal_size", "4GB"),
        ("max_connections", "200"),
        ("jit", "off"),
        ("listen_addresses", ""),
    ],
)
async def test_a_new_cluster_is_safe_and_set_up_for_a_queue(running: EmbeddedPostgres, name: str, value: str) -> None:
    async with connected(running.dsn()) as connection:
        found = await connection.fetchval("SELECT current_setting($1)", name)
    assert found.startswith(value)
    assert bool(found) == bool(value)


def test_the_server_is_out_of_reach_of_the_terminal_and_of_other_users(running: EmbeddedPostgres) -> None:
    assert os.getsid(running.pid) == running.pid != os.getsid(0)
    assert psutil.Process(running.pid).uids().real != 0
    assert permissions(running.data_dir) == 0o700
    assert permissions(running.data_dir / ".s.PGSQL.5432") == 0o700


def test_the_server_does_not_inherit_our_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEEN_ENCRYPTION_KEY", "hush")
    monkeypatch.setenv("PGPORT", "1")
    with EmbeddedPostgres(tmp_path / "pg") as postgres:
        assert not {"QUEEN_ENCRYPTION_KEY", "PGPORT"} & psutil.Process(postgres.pid).environ().keys()


async def test_data_survive_a_stop_and_a_crash(tmp_path: Path) -> None:
    postgres = EmbeddedPostgres(tmp_path / "pg")
    with postgres:
        await store(postgres, 1)
    assert not postgres.running
    with postgres:
        assert await stored(postgres) == [1]
        await store(postgres, 2)
        crashed = postgres.pid
        postgres.kill()
        assert not postgres.running
        postgres.start()
        assert postgres.pid != crashed
        assert await stored(postgres) == [1, 2]
        postgres.stop()
        postgres.start()
        assert await stored(postgres) == [1, 2]


async def test_settings_given_win_and_apply_after_a_restart(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "pg"):
        pass
    with EmbeddedPostgres(tmp_path / "pg", settings={"max_connections": "33", "work_mem": "5MB"}) as postgres:
        async with connected(postgres.dsn()) as connection:
            assert await connection.fetchval("SHOW max_connections") == "33"
            assert await connection.fetchval("SHOW work_mem") == "5MB"


async def test_a_server_left_over_by_a_killed_queen_is_taken_over(tmp_path: Path) -> None:
    pid = start_elsewhere_and_kill_the_starter(tmp_path / "pg")
    with EmbeddedPostgres(tmp_path / "pg") as postgres:
        assert postgres.pid == pid
        await store(postgres, 1)
        assert await stored(postgres) == [1]
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_server_killed_after_its_queen_is_started_anew(tmp_path: Path) -> None:
    pid = start_elsewhere_and_kill_the_starter(tmp_path / "pg")
    os.kill(pid, signal.SIGKILL)
    with EmbeddedPostgres(tmp_path / "pg") as postgres:
        assert postgres.pid != pid
        await store(postgres, 1)


async def test_a_server_whose_socket_was_removed_is_replaced(tmp_path: Path) -> None:
    pid = start_elsewhere_and_kill_the_starter(tmp_path / "pg")
    for left in (tmp_path / "pg").glob(".s.PGSQL.*"):
        left.unlink()
    os.kill(pid, signal.SIGTERM)
    with EmbeddedPostgres(tmp_path / "pg") as postgres:
        assert postgres.pid != pid
        await store(postgres, 1)


async def test_a_stale_pid_file_that_names_another_process_is_no_hindrance(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "pg") as postgres:
        pid_file = tmp_path / "pg" / "cluster" / "postmaster.pid"
        lines = pid_file.read_text().splitlines()
        postgres.kill()
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    with EmbeddedPostgres(tmp_path / "pg") as postgres:
        await store(postgres, 1)
        assert await stored(postgres) == [1]


def test_a_directory_serves_one_queen_at_a_time(running: EmbeddedPostgres) -> None:
    with pytest.raises(EmbeddedPostgresError, match=rf"in use by another Queen \(process {os.getpid()}\)"):
        EmbeddedPostgres(running.data_dir).start()
    assert running.running


async def test_a_long_path_gets_its_socket_in_a_private_directory_elsewhere(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / ("long-" * 30) / "pg") as postgres:
        await store(postgres, 1)
        (directory,) = parse_qs(urlsplit(postgres.dsn()).query)["host"]
        assert "long-" not in directory
        assert permissions(Path(directory)) == 0o700
    with pytest.raises(FileNotFoundError):
        permissions(Path(directory))


async def test_with_a_port_it_listens_on_this_machine_and_asks_for_a_password(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with EmbeddedPostgres(tmp_path / "pg", port=port) as postgres:
        url = f"postgresql://postgres:hush@127.0.0.1:{port}/postgres"
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(url)
        async with connected(postgres.dsn()) as connection:
            await connection.execute("ALTER ROLE postgres PASSWORD 'hush'")
        async with connected(url) as connection:
            assert await connection.fetchval("SELECT 1") == 1


def test_a_cluster_of_another_major_version_is_refused(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "pg", version=16):
        pass
    with pytest.raises(EmbeddedPostgresError, match="created by PostgreSQL 16 and is not compatible with 18"):
        EmbeddedPostgres(tmp_path / "pg", version=18).start()


def test_a_version_that_is_not_carried_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedPostgresError, match="no embedded PostgreSQL 12: available versions are 16 and 18"):
        EmbeddedPostgres(tmp_path / "pg", version=12).start()


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    before = tmp_path.stat()
    with pytest.raises(EmbeddedPostgresError, match="is not empty"):
        EmbeddedPostgres(tmp_path).start()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert (tmp_path.stat().st_uid, tmp_path.stat().st_mode) == (before.st_uid, before.st_mode)


def test_a_directory_of_another_user_is_refused_by_both_names(tmp_path: Path) -> None:
    somebody = Account(name="somebody", uid=os.geteuid() + 1, gid=os.getegid(), switched=False)
    with pytest.raises(EmbeddedPostgresError, match=r"is owned by \w+, but PostgreSQL would run as somebody"):
        check_owner(tmp_path, somebody)


def test_a_path_that_cannot_be_a_directory_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedPostgresError, match=r"cannot use .*/file.*--data-dir or QUEEN_DATA_DIR"):
        EmbeddedPostgres(tmp_path / "file" / "pg").start()


def test_a_server_that_dies_while_starting_shows_its_last_words(tmp_path: Path) -> None:
    postgres = EmbeddedPostgres(tmp_path / "pg", settings={"shared_buffers": "nonsense"})
    with pytest.raises(EmbeddedPostgresError) as refused:
        postgres.start()
    assert "PostgreSQL exited during startup" in str(refused.value)
    assert 'invalid value for parameter "shared_buffers": "nonsense"' in str(refused.value)
    with EmbeddedPostgres(tmp_path / "pg") as mended:
        assert mended.running


async def test_an_interrupted_creation_is_begun_again(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "pg"):
        pass
    cluster = tmp_path / "pg" / "cluster"
    cluster.rename(cluster.with_suffix(".new"))
    shutil.rmtree(cluster.with_suffix(".new") / "global")
    with EmbeddedPostgres(tmp_path / "pg") as postgres:
        await store(postgres, 1)


def test_a_full_disk_is_called_a_full_disk(tmp_path: Path) -> None:
    last_words = 'FATAL:  could not write lock file "postmaster.pid": No space left on device'
    message = str(failure("PostgreSQL exited during startup", last_words, tmp_path))
    assert "Disk full: free some space" in message
    assert last_words in message
    assert str(tmp_path) in message
