"""`queen doctor`: the fault behind every check is made, found, and answered with a remedy."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as clocks
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest

from queen.cli import cert
from queen.cli.common.session import Session
from queen.cli.tools import doctor
from queen.embedded import EmbeddedPostgres
from tests.cli.conftest import Cli, Served, new_database, serving
from tests.support.ageing import age, block_until


def problems(cli: Cli, *arguments: object) -> dict[str, dict[str, str]]:
    """What is not well, by check; each says what to do about it."""
    found = {row["check"]: row for row in cli("doctor", "--problems", *arguments).json}
    assert [row for row in found.values() if not row["remedy"] or row["status"] == "ok"] == []
    return found


def on_database(dsn: str, *statements: str) -> None:
    async def run() -> None:
        connection = await asyncpg.connect(dsn)
        for statement in statements:
            await connection.execute(statement)
        await connection.close()

    asyncio.run(run())


@pytest.fixture
def database(postgres: EmbeddedPostgres) -> str:
    """A database with our schema that a test may spoil."""
    return asyncio.run(new_database(postgres))


def test_nothing_is_said_of_what_is_well(cli: Cli, server: Served) -> None:
    findings = {row["check"]: row for row in cli("doctor", "--database-url", server.dsn).json}
    well = (
        *("reachable", "version", "ready", "clock", "spool", "maintenance", "lag", "leases", "dead letters", "cache"),
        *("dead tuples", "access", "postgresql", "postgresql clock", "schema", "indexes", "connections"),
        "transaction ids",
    )
    assert {check: findings[check]["status"] for check in well} == dict.fromkeys(well, "ok")
    ran = cli("doctor", "--database-url", server.dsn, "-o", "table")
    # The PostgreSQL of the tests runs without these two.
    assert ran.code == 2
    assert "-> fsync = on, or a crash loses and corrupts data" in ran.out
    assert ran.err.endswith(" checks: 2 failed, 0 warnings\n")
    assert set(problems(cli, "--database-url", server.dsn)) == {"setting"}


def test_a_server_that_does_not_answer(cli: Cli) -> None:
    ran = cli("doctor", "--server", "http://127.0.0.1:1")
    assert (ran.code, ran.json[0]["status"]) == (2, "fail")
    assert "queen serve" in ran.json[0]["remedy"]


def test_a_server_that_is_not_ready() -> None:
    answer = doctor._ready({"ready": False, "reasons": ["no key to verify tokens with could be fetched"]})
    assert (answer.status, answer.remedy) == ("fail", "see the log of the server")


def test_another_version(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "__version__", "9.0")
    assert "this command 9.0" in problems(cli)["version"]["found"]


def test_a_server_whose_postgresql_is_gone(cli: Cli, postgres: EmbeddedPostgres, database: str, tmp_path: Path) -> None:
    name = database.rpartition("/")[2].partition("?")[0]
    with serving(database, tmp_path) as lonely:
        block = f"ALTER DATABASE {name} ALLOW_CONNECTIONS false"
        on_database(
            postgres.dsn(), block, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
        )
        at = ("--server", lonely.url)
        block_until(lambda: "ready" in problems(cli, *at), "the server notices")
        found = problems(cli, *at, "--database-url", database)
        assert found["ready"]["status"] == "fail"
        assert "is not currently accepting connections" in found["ready"]["found"]
        assert found["ready"]["remedy"].startswith("start PostgreSQL")
        assert found["ready"]["remedy"].endswith("pushes are buffered meanwhile")
        assert found["postgresql"]["status"] == "fail"
        assert set(found) == {"ready", "postgresql"}
        on_database(postgres.dsn(), f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


def shifted(days: float) -> type[clocks.datetime]:
    """A clock that is off."""

    class Shifted(clocks.datetime):
        @classmethod
        def now(cls, tz: clocks.tzinfo | None = None) -> Shifted:
            return cls.fromtimestamp(super().now(tz).timestamp() + days * 86400, tz)

    return Shifted


@pytest.mark.parametrize("seconds", [-90, 90])
def test_a_clock_that_is_off(cli: Cli, server: Served, monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    monkeypatch.setattr(doctor, "datetime", shifted(seconds / 86400))
    found = problems(cli, "--database-url", server.dsn)
    for check, whose in (("clock", "the server"), ("postgresql clock", "PostgreSQL")):
        assert found[check]["found"].startswith(f"{whose} is {'-' if seconds > 0 else '+'}"), found[check]
        assert "NTP" in found[check]["remedy"]


def test_pushes_that_wait_on_disk_and_pushes_that_were_refused(cli: Cli, name: str) -> None:
    cli("queue", "configure", name, "--max-size", 1)
    cli("maintenance", "on", "--yes")
    for number in range(2):
        cli("push", name, "--data", number)
    found = problems(cli)
    assert found["maintenance"]["remedy"] == "queen maintenance off"
    assert found["spool"]["found"] == "2 records wait on disk"
    cli("maintenance", "off")
    block_until(lambda: problems(cli).get("spool", {}).get("status") == "fail", "one does not fit")
    assert problems(cli)["spool"]["found"] == "1 records could not be replayed"
    cli("queue", "configure", name, "--max-size", 0)
    cli("maintenance", "on", "--yes")
    cli("maintenance", "off")
    block_until(lambda: "spool" not in problems(cli), "it fits now")
    cli("maintenance", "on", "--pop", "--yes")
    assert problems(cli)["maintenance"]["remedy"] == "queen maintenance off --pop"
    cli("maintenance", "off", "--pop")


def test_groups_that_are_behind_leases_that_are_held_and_dead_letters(cli: Cli, server: Served, name: str) -> None:
    cli("queue", "configure", name, "--retry-limit", 0, "--lease-time", 3600)
    cli("push", name, "--partition", name, stdin="1\n2\n3")
    (first,) = cli("pop", name, "--cg", "slow").lines
    cli("ack", first["transactionId"], "--partition-id", first["partitionId"], "--cg", "slow", "--failed")
    cli("pop", name, "--cg", "slow")

    async def make_older() -> None:
        connection = await asyncpg.connect(server.dsn)
        await age(connection, 7200, name)
        await connection.close()

    asyncio.run(make_older())
    found = problems(cli)
    assert found["lag"]["found"] == f"slow on {name}: 2 messages, 2h00m"
    assert f"queen group seek slow {name} --to end" in found["lag"]["remedy"]
    assert found["leases"]["found"] == f"slow on {name}/{name} holds a lease, 2h00m behind"
    assert "shorten --lease-time" in found["leases"]["remedy"]
    assert found["dead letters"]["found"] == "1"
    assert "queen dlq redrive" in found["dead letters"]["remedy"]
    cli("queue", "delete", name, "--yes")


def test_a_lease_that_has_ended_has_no_holder(cli: Cli, server: Served, name: str) -> None:
    cli("push", name, "--partition", name, stdin="1")
    cli("pop", name, "--cg", "gone")

    async def end_it() -> None:
        connection = await asyncpg.connect(server.dsn)
        await age(connection, 7200, name)
        ended = "UPDATE queen.cursors SET lease_until = now() - interval '1 hour' WHERE lease_until > now()"
        await connection.execute(ended)
        await connection.close()

    asyncio.run(end_it())
    found = problems(cli)
    assert found["lag"]["found"] == f"gone on {name}: 1 messages, 2h00m"
    assert "leases" not in found
    cli("queue", "delete", name, "--yes")


def test_a_cache_that_is_too_small() -> None:
    stats = {"databaseCache": {"diskReads": 200_000, "cacheHits": 800_000}, "deadTuples": []}
    cache, _ = doctor._postgres(SimpleNamespace(admin=SimpleNamespace(get_postgres_stats=lambda: stats)))
    assert (cache.status, "shared_buffers" in cache.remedy) == ("warn", True)
    assert cache.found.startswith("80.0 % of reads are cached")


def test_tables_of_dead_rows(cli: Cli, server: Served) -> None:
    on_database(
        server.dsn,
        "CREATE TABLE queen.bloated (id int) WITH (autovacuum_enabled = off)",
        "INSERT INTO queen.bloated SELECT generate_series(1, 10001)",
        "DELETE FROM queen.bloated",
        "SELECT pg_stat_force_next_flush()",
    )
    block_until(lambda: "dead tuples" in problems(cli), "statistics are there")
    found = problems(cli)["dead tuples"]
    assert found["found"] == "bloated: 10001 (100 %)"
    assert "VACUUM queen.bloated" in found["remedy"]
    on_database(server.dsn, "DROP TABLE queen.bloated")


@pytest.fixture
def make_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], dict[str, Path]]:
    """Makes a certificate that is valid for so many days, or has not been for as many."""

    def make(days: int) -> dict[str, Path]:
        with monkeypatch.context() as patched:
            then = SimpleNamespace(**{**vars(clocks), "datetime": shifted(min(0, 2 * days))})
            patched.setattr(cert, "datetime", then)
            made = cert.self_signed(["127.0.0.1"], abs(days))
        paths = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
        for path, pem in zip(paths.values(), made, strict=True):
            path.write_bytes(pem)
        return paths

    return make


@contextmanager
def shaking_hands(certificate: Path, key: Path) -> Iterator[str]:
    """The URL of something that speaks TLS, and nothing else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with contextlib.suppress(OSError), context.wrap_socket(client, server_side=True) as secure:
                        secure.recv(1)

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    ("days", "trust", "status", "text"),
    [
        (365, True, "ok", "valid for 36"),
        (10, True, "warn", "valid for 10 days"),
        (-5, True, "fail", "expired 5 days ago"),
        (365, False, "fail", "not trusted: self-signed certificate"),
    ],
)
def test_certificates(
    make_certificate: Callable[[int], dict[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
    days: int,
    trust: bool,
    status: str,
    text: str,
) -> None:
    paths = make_certificate(days)
    if trust:
        monkeypatch.setenv("SSL_CERT_FILE", str(paths["tls_cert"]))
    with shaking_hands(*paths.values()) as url:
        (found,) = doctor._certificate(Session({"server": url}))
        assert (found.status, bool(found.remedy)) == (status, status != "ok")
        assert found.found.startswith(text)
        (insecure,) = doctor._certificate(Session({"server": url, "insecure": True}))
        assert insecure.status == (status if trust else "warn")


def test_a_server_with_an_untrusted_certificate(
    cli: Cli, server: Served, make_certificate: Callable[[int], dict[str, Path]], tmp_path: Path
) -> None:
    with serving(server.dsn, tmp_path, **make_certificate(10)) as secure:
        at = ("--server", secure.url.replace("http:", "https:"))
        assert {check: row["status"] for check, row in problems(cli, *at).items()} == {
            "reachable": "fail",
            "certificate": "fail",
        }
        assert set(problems(cli, *at, "--insecure")) == {"certificate"}
        refused = cli("queue", "list", *at)
        assert refused.code == 2
        assert "its certificate is not trusted (self" in refused.err
        assert refused.err.endswith("have this host trust its issuer (SSL_CERT_FILE), or pass --insecure\n")


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("8.8.8.8", "public"),
        ("2606:4700:4700::1111", "public"),
        ("10.1.2.3", "private"),
        ("no.such.host.invalid", "private"),
        ("127.0.0.1", "local"),
        ("::1", "local"),
    ],
)
def test_where_an_address_can_be_reached_from(host: str, place: str) -> None:
    assert doctor._place(host) == place


@pytest.mark.parametrize(("place", "status"), [("public", "fail"), ("private", "warn"), ("local", "ok")])
def test_a_server_that_anybody_may_administer(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, place: str, status: str
) -> None:
    monkeypatch.setattr(doctor, "_place", lambda host: place)
    found = {row["check"]: row for row in cli("doctor").json}["access"]
    assert found["status"] == status
    assert ("JWT_ENABLED=true" in found["remedy"]) == (status != "ok")


def test_a_server_that_listens_to_every_address(cli: Cli, server: Served, tmp_path: Path) -> None:
    with serving(server.dsn, tmp_path, host="0.0.0.0") as exposed:
        found = problems(cli, "--server", exposed.url)["access"]
    assert "HOST=0.0.0.0 is reachable from other machines" in found["found"]


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("fsync", "off", "on"),
        ("full_page_writes", "off", "on"),
        ("data_checksums", "off", "on"),
        ("autovacuum", "off", "on"),
        ("track_counts", "off", "on"),
        ("synchronous_commit", "off", "local"),
        ("shared_buffers", "2048", "16384"),
        ("max_wal_size", "64", "1024"),
    ],
)
def test_settings_that_hurt(name: str, bad: str, good: str) -> None:
    (judged,) = [(harmful, remedy) for setting, harmful, _, remedy in doctor._HARMFUL if setting == name]
    assert judged[0](bad)
    assert not judged[0](good)
    assert judged[1].startswith(f"{name} = ")


def test_settings_of_the_database_that_hurt(cli: Cli, postgres: EmbeddedPostgres, database: str) -> None:
    name = database.rpartition("/")[2].partition("?")[0]
    on_database(
        postgres.dsn(),
        f"ALTER DATABASE {name} SET synchronous_commit = off",
        f"ALTER DATABASE {name} SET track_counts = off",
    )
    found = [row["found"] for row in cli("doctor", "--database-url", database).json if row["check"] == "setting"]
    assert found == ["fsync = off", "full_page_writes = off", "track_counts = off", "synchronous_commit = off"]


def test_schemas_that_do_not_fit(cli: Cli, postgres: EmbeddedPostgres, database: str) -> None:
    empty = asyncio.run(new_database(postgres, None))
    assert problems(cli, "--database-url", empty)["schema"] == {
        "check": "schema",
        "status": "fail",
        "found": "there is none",
        "remedy": "start a server on this database once: queen serve",
    }
    on_database(database, "INSERT INTO queen.schema_migrations SELECT 9999, 'later', now()")
    assert problems(cli, "--database-url", database)["schema"]["found"] == "version 9999 is newer than this command"
    on_database(database, "DELETE FROM queen.schema_migrations WHERE version IN (9999, 2)")
    assert problems(cli, "--database-url", database)["schema"]["found"] == "1 migrations are missing"


def test_indexes_that_are_missing_or_invalid(cli: Cli, database: str) -> None:
    on_database(database, "ALTER INDEX queen.traces_by_message RENAME TO hidden_away")
    assert problems(cli, "--database-url", database)["indexes"]["found"] == "missing: traces_by_message"
    on_database(database, "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'queen.hidden_away'::regclass")
    found = problems(cli, "--database-url", database)["indexes"]
    assert (found["status"], found["found"]) == ("fail", "invalid: hidden_away")
    assert found["remedy"] == "REINDEX INDEX CONCURRENTLY queen.hidden_away"


def test_sessions_and_transaction_ids(cli: Cli, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_TRANSACTION_SECONDS", 0), ("_CONNECTION_SHARE", 0), ("_XID_AGE", 0)):
        monkeypatch.setattr(doctor, name, value)

    async def while_one_is_open(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        connection = await asyncpg.connect(server.dsn)
        async with connection.transaction():
            await connection.fetch("SELECT 'an open one'")
            found = await work
        await connection.close()
        return found

    async def look() -> dict[str, Any]:
        return await asyncio.to_thread(problems, cli, "--database-url", server.dsn)

    found = asyncio.run(while_one_is_open(look()))
    assert "SELECT 'an open one'" in found["transactions"]["found"]
    assert "pg_terminate_backend" in found["transactions"]["remedy"]
    assert "DB_POOL_SIZE" in found["connections"]["remedy"]
    assert found["transaction ids"]["remedy"] == "VACUUM FREEZE"


def test_a_postgresql_that_is_too_old_or_does_not_answer(cli: Cli) -> None:
    assert doctor._postgres_version(SimpleNamespace(major=14, minor=2), "").status == "fail"
    ran = cli("doctor", "--database-url", "postgresql://nobody@127.0.0.1:1/x")
    assert ran.code == 2
    assert problems(cli, "--database-url", "postgresql://nobody@127.0.0.1:1/x")["postgresql"]["status"] == "fail"


def test_a_disk_that_is_nearly_full(cli: Cli, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage("/")._replace(total=100 * 2**30, free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    found = problems(cli, "--data-dir", server.data_dir)
    assert found["disk (data)"]["found"].endswith("1.0 GB free (1 %)")
    assert "free space" in found["disk (data)"]["remedy"]


def test_a_token_that_may_not_look(cli: Cli, server: Served, tmp_path: Path) -> None:
    with serving(server.dsn, tmp_path, jwt_enabled=True, jwt_secret="s" * 32) as guarded:
        found = problems(cli, "--server", guarded.url)
    assert found["spool"]["remedy"] == "log in: queen login"
