"""Statistics of PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime

import asyncpg

from queen.storage.database import Database, Record
from queen.wire.api.monitoring.analytics import (
    ActiveQuery,
    AutovacuumStatus,
    BufferConfig,
    BufferUsage,
    CacheSum,
    CacheSummary,
    DatabaseCache,
    DeadTuples,
    HotUpdates,
    IndexCache,
    PostgresStats,
    TableCache,
    TableSize,
)
from queen.wire.times import iso_millis


async def postgres_stats(database: Database) -> PostgresStats:
    """Caches, dead rows, running queries, sizes."""
    (cache,) = await database.fetch("database_cache")
    tables = await database.fetch("table_cache")
    indexes = await database.fetch("index_cache")
    activity = await database.fetch("table_activity")
    (buffers,) = await database.fetch("buffer_config")
    return PostgresStats(
        timestamp=iso_millis(datetime.now(UTC)),
        database=cache["database"],
        database_cache=DatabaseCache(cache["database"], *_cache(cache)),
        table_cache=[TableCache(row["schema"], row["table"], *_cache(row)) for row in tables],
        index_cache=[IndexCache(row["schema"], row["table"], *_cache(row), row["index"]) for row in indexes],
        cache_summary=CacheSummary(_summary(tables), _summary(indexes)),
        dead_tuples=[
            DeadTuples(
                row["schema"],
                row["table"],
                row["dead"],
                row["live"],
                row["dead_percentage"],
                iso_millis(row["last_vacuum"]),
                iso_millis(row["last_autovacuum"]),
            )
            for row in activity
        ],
        hot_updates=[
            HotUpdates(row["schema"], row["table"], row["updates"], row["hot_updates"], row["hot_percentage"])
            for row in activity
        ],
        active_queries=[
            ActiveQuery(
                row["pid"],
                round(row["duration"] or 0.0, 3),
                row["state"],
                row["query"],
                row["wait_event_type"],
                row["wait_event"],
            )
            for row in await database.fetch("active_queries")
        ],
        autovacuum_status=[
            AutovacuumStatus(
                row["table"],
                iso_millis(row["last_autovacuum"]),
                row["dead"],
                row["autovacuum_count"],
                row["autoanalyze_count"],
            )
            for row in activity
        ],
        buffer_config=BufferConfig(int(buffers["pages"]), buffers["size"]),
        buffer_usage=await _buffer_usage(database) if buffers["can_tell"] else [],
        table_sizes=[
            TableSize(
                row["table"],
                row["total_pretty"],
                row["total"],
                row["own_pretty"],
                row["own"],
                row["indexes_pretty"],
                row["indexes"],
            )
            for row in await database.fetch("table_sizes")
        ],
    )


async def _buffer_usage(database: Database) -> list[BufferUsage]:
    try:
        rows = await database.fetch("buffer_usage")
    except asyncpg.InsufficientPrivilegeError:
        # The extension is there, but not for the user that the server connects as.
        return []
    return [BufferUsage(row["object"], row["size"], row["bytes"], row["percentage"]) for row in rows]


def _cache(row: Record) -> tuple[int, int, float]:
    return row["disk_reads"], row["cache_hits"], row["ratio"]


def _summary(rows: list[Record]) -> CacheSum:
    reads, hits = sum(row["disk_reads"] for row in rows), sum(row["cache_hits"] for row in rows)
    return CacheSum(reads, hits, round(100 * hits / (hits + reads), 2) if hits + reads else 0.0)
