"""What PostgreSQL says of itself."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import asyncpg

from queen.storage.database import Database, Record
from queen.wire.times import iso_millis


async def postgres_stats(database: Database) -> dict[str, Any]:
    """Caches, dead rows, running queries, sizes."""
    (cache,) = await database.fetch("database_cache")
    tables = await database.fetch("table_cache")
    indexes = await database.fetch("index_cache")
    activity = await database.fetch("table_activity")
    (buffers,) = await database.fetch("buffer_config")
    return {
        "timestamp": iso_millis(datetime.now(UTC)),
        "database": cache["database"],
        "databaseCache": {"database": cache["database"], **_cache(cache)},
        "tableCache": [{"schema": row["schema"], "table": row["table"], **_cache(row)} for row in tables],
        "indexCache": [
            {"schema": row["schema"], "table": row["table"], "index": row["index"], **_cache(row)} for row in indexes
        ],
        "cacheSummary": {"tables": _summary(tables), "indexes": _summary(indexes)},
        "deadTuples": [
            {
                "schema": row["schema"],
                "table": row["table"],
                "deadTuples": row["dead"],
                "liveTuples": row["live"],
                "deadPercentage": row["dead_percentage"],
                "lastVacuum": iso_millis(row["last_vacuum"]),
                "lastAutovacuum": iso_millis(row["last_autovacuum"]),
            }
            for row in activity
        ],
        "hotUpdates": [
            {
                "schema": row["schema"],
                "table": row["table"],
                "totalUpdates": row["updates"],
                "hotUpdates": row["hot_updates"],
                "hotUpdatePercentage": row["hot_percentage"],
            }
            for row in activity
        ],
        "activeQueries": [
            {
                "pid": row["pid"],
                "duration": round(row["duration"] or 0.0, 3),
                "state": row["state"],
                "query": row["query"],
                "waitEventType": row["wait_event_type"],
                "waitEvent": row["wait_event"],
            }
            for row in await database.fetch("active_queries")
        ],
        "autovacuumStatus": [
            {
                "table": row["table"],
                "lastAutovacuum": iso_millis(row["last_autovacuum"]),
                "deadTuples": row["dead"],
                "autovacuumCount": row["autovacuum_count"],
                "autoanalyzeCount": row["autoanalyze_count"],
            }
            for row in activity
        ],
        "bufferConfig": {"sharedBuffers": int(buffers["pages"]), "sharedBuffersSize": buffers["size"]},
        "bufferUsage": await _buffer_usage(database) if buffers["can_tell"] else [],
        "tableSizes": [
            {
                "table": row["table"],
                "totalSize": row["total_pretty"],
                "totalSizeBytes": row["total"],
                "tableSize": row["own_pretty"],
                "tableSizeBytes": row["own"],
                "indexSize": row["indexes_pretty"],
                "indexSizeBytes": row["indexes"],
            }
            for row in await database.fetch("table_sizes")
        ],
    }


async def _buffer_usage(database: Database) -> list[dict[str, Any]]:
    try:
        rows = await database.fetch("buffer_usage")
    except asyncpg.InsufficientPrivilegeError:
        # The extension is there, but not for the user that the server connects as.
        return []
    return [
        {
            "object": row["object"],
            "bufferedSize": row["size"],
            "bufferedBytes": row["bytes"],
            "percentOfCache": row["percentage"],
        }
        for row in rows
    ]


def _cache(row: Record) -> dict[str, Any]:
    return {"diskReads": row["disk_reads"], "cacheHits": row["cache_hits"], "cacheHitRatio": row["ratio"]}


def _summary(rows: list[Record]) -> dict[str, Any]:
    reads, hits = sum(row["disk_reads"] for row in rows), sum(row["cache_hits"] for row in rows)
    ratio = round(100 * hits / (hits + reads), 2) if hits + reads else 0.0
    return {"diskReads": reads, "cacheHits": hits, "hitRatio": ratio}
