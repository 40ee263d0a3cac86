"""The PostgreSQL under the server: where it is, how durable it is, what one commit costs, what is stored."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import asyncpg

SCHEMA = "queen"
COMMIT_ROW_BYTES = 300
COMMITS_TIMED = 400
COMMITS_BEFORE = 50
STATISTICS_WITHIN_SECONDS = 12  # a backend that has become idle publishes its last counts after 10 seconds
SHOWN_SETTINGS = (
    "server_version",
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "wal_sync_method",
    "shared_buffers",
    "max_wal_size",
    "wal_compression",
)


@dataclass(frozen=True)
class Database:
    """How to reach the server's database."""

    dsn: str

    async def connect(self) -> asyncpg.Connection:
        return await asyncpg.connect(self.dsn)


def read_postmaster(data_dir: Path) -> tuple[int, str]:
    """Process id of the embedded PostgreSQL and the DSN of its maintenance database."""
    places = sorted((data_dir / "postgres").rglob("postmaster.pid"))
    if not places:
        raise LookupError(f"no postmaster.pid below {data_dir / 'postgres'}: is PostgreSQL running there?")
    lines = places[0].read_text().splitlines()
    pid, port, socket_dir = int(lines[0]), lines[3].strip(), lines[4].strip()
    return pid, f"postgresql://postgres@/postgres?host={socket_dir}&port={port}"


async def find_database(maintenance_dsn: str) -> Database:
    """The database that holds the server's schema, whatever it is called."""
    connection = await asyncpg.connect(maintenance_dsn)
    try:
        names = await connection.fetch("SELECT datname FROM pg_database WHERE datallowconn AND NOT datistemplate")
    finally:
        await connection.close()
    for row in names:
        dsn = maintenance_dsn.replace("/postgres?", f"/{row['datname']}?", 1)
        if await has_schema(dsn):
            return Database(dsn)
    raise LookupError(f"no database of this PostgreSQL has a schema {SCHEMA!r}: {maintenance_dsn}")


async def has_schema(dsn: str) -> bool:
    connection = await asyncpg.connect(dsn)
    try:
        return bool(await connection.fetchval("SELECT 1 FROM pg_namespace WHERE nspname = $1", SCHEMA))
    finally:
        await connection.close()


async def read_settings(database: Database) -> dict[str, str]:
    """The settings that decide how durable and how fast a commit is, as a new session sees them."""
    connection = await database.connect()
    try:
        rows = await connection.fetch(
            "SELECT name, current_setting(name) AS value FROM pg_settings WHERE name = ANY($1)",
            list(SHOWN_SETTINGS),
        )
        return {row["name"]: row["value"] for row in rows}
    finally:
        await connection.close()


def not_durable(settings: dict[str, str]) -> list[str]:
    """Settings with which a commit returns before it is durable."""
    wanted = {"fsync": ("on",), "synchronous_commit": ("on", "local", "remote_apply", "remote_write")}
    return [f"{name}={settings.get(name)}" for name, values in wanted.items() if settings.get(name) not in values]


async def commit_latencies_ms(database: Database) -> list[float]:
    """Times of single-row commits, one after the other on one connection."""
    connection = await database.connect()
    try:
        await connection.execute("CREATE TABLE bench_commit (id bigserial PRIMARY KEY, body bytea)")
        insert = await connection.prepare("INSERT INTO bench_commit (body) VALUES ($1)")
        row = bytes(range(256)) + bytes(COMMIT_ROW_BYTES - 256)
        times: list[float] = []
        for number in range(COMMITS_BEFORE + COMMITS_TIMED):
            started = time.perf_counter()
            await insert.fetch(row)
            if number >= COMMITS_BEFORE:
                times.append((time.perf_counter() - started) * 1000)
        await connection.execute("DROP TABLE bench_commit")
        return times
    finally:
        await connection.close()


async def commit_p50_ms(database: Database) -> float:
    return median(await commit_latencies_ms(database))


async def wal_fsyncs(database: Database) -> int:
    """How often the WAL has been forced to disk since the statistics began, as far as it is known yet."""
    connection = await database.connect()
    try:
        version = int(await connection.fetchval("SELECT current_setting('server_version_num')"))
        counter = (
            "SELECT sum(fsyncs)::bigint FROM pg_stat_io WHERE object = 'wal'"
            if version >= 180000
            else "SELECT wal_sync FROM pg_stat_wal"
        )
        return int(await connection.fetchval(counter))
    finally:
        await connection.close()


async def wal_fsyncs_since(database: Database, before: int, expected: float) -> int:
    """Flushes since a count was taken; waits for the statistics to catch up with what is expected."""
    deadline = time.monotonic() + STATISTICS_WITHIN_SECONDS
    while True:
        flushed = await wal_fsyncs(database) - before
        if flushed >= expected or time.monotonic() > deadline:
            return flushed
        await asyncio.sleep(0.5)


async def stored_bytes(database: Database) -> int:
    """Size of every table of the server on disk, with indexes, TOAST and maps."""
    connection = await database.connect()
    try:
        await connection.execute("CHECKPOINT")
        return int(
            await connection.fetchval(
                "SELECT sum(pg_total_relation_size(c.oid))::bigint FROM pg_class c"
                " JOIN pg_namespace n ON n.oid = c.relnamespace"
                " WHERE n.nspname = $1 AND c.relkind IN ('r', 'm')",
                SCHEMA,
            )
        )
    finally:
        await connection.close()
