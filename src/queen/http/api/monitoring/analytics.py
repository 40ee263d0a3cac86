"""Metrics over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from queen.http.api.monitoring.status import time_range
from queen.http.auth import names
from queen.http.routing.call import Call
from queen.http.routing.context import Shard
from queen.http.routing.placement import FIRST_SHARD, Everywhere, Placement, summed
from queen.http.routing.route import DATABASE, RouteTable
from queen.http.server.message import Access
from queen.monitoring.history import rollup_series
from queen.monitoring.postgres_stats import postgres_stats
from queen.wire.api.monitoring.analytics import (
    OperationsQuery,
    Parked,
    PopLagPoint,
    PostgresStats,
    QueueOperations,
    QueueSeriesQuery,
    RemovedPoint,
    Retention,
    RolledUp,
    RollupQuery,
    SystemMetrics,
    WorkerMetrics,
    WorkersQuery,
)

routes = RouteTable("Status")

_HOURS = 24


def _series(
    name: str, returns: Any, query: Any, summary: str, placement: Placement = FIRST_SHARD, **declared: Any
) -> Callable[..., Any]:
    return routes.on_shard(
        "GET",
        f"/api/v1/analytics/{name}",
        access=Access.READ_ONLY,
        placement=placement,
        summary=summary,
        description="Of the last day, unless `from` and `to` are sent.",
        query=query,
        returns={200: returns},
        errors=DATABASE,
        cached=True,
        **declared,
    )


_BY_QUEUE: Final[Mapping[str, Any]] = {"names": names.by_query("queue"), "of_groups": False}


def _merge_worker_metrics(answers: Sequence[WorkerMetrics]) -> WorkerMetrics:
    """Shard 0 counts for all; what is pending is on every shard."""
    pending = sum(answer.summary.pending_messages for answer in answers)
    return msgspec.structs.replace(
        answers[0], summary=msgspec.structs.replace(answers[0].summary, pending_messages=pending)
    )


def _merge_retention(answers: Sequence[Retention]) -> Retention:
    buckets: dict[str, list[RemovedPoint]] = {}
    for answer in answers:
        for point in answer.series:
            buckets.setdefault(point.bucket, []).append(point)
    return msgspec.structs.replace(
        answers[0],
        series=[summed(buckets[bucket]) for bucket in sorted(buckets)],
        totals=summed([answer.totals for answer in answers]),
    )


def _merge_postgres_stats(answers: Sequence[PostgresStats]) -> PostgresStats:
    return msgspec.structs.replace(answers[0], shards=list(answers))


@_series("system-metrics", SystemMetrics, WorkersQuery, "CPU, memory and connections of the workers")
async def system_metrics(shard: Shard, call: Call[WorkersQuery, None]) -> SystemMetrics:
    query = call.query
    return await shard.history.system_metrics(time_range(query, _HOURS), query.hostname, query.worker_id)


@_series(
    "worker-metrics",
    WorkerMetrics,
    WorkersQuery,
    "Requests and messages of the workers",
    Everywhere(_merge_worker_metrics),
)
async def worker_metrics(shard: Shard, call: Call[WorkersQuery, None]) -> WorkerMetrics:
    query = call.query
    return await shard.status.worker_metrics(time_range(query, _HOURS), query.hostname, query.worker_id)


@_series(
    "queue-lag", list[PopLagPoint], QueueSeriesQuery, "How long messages waited until they were popped", **_BY_QUEUE
)
async def queue_lag(shard: Shard, call: Call[QueueSeriesQuery, None]) -> list[PopLagPoint]:
    return await shard.history.queue_lag(time_range(call.query, _HOURS), _names(call.query))


@_series("queue-ops", QueueOperations, OperationsQuery, "Operations on queues", **_BY_QUEUE)
async def queue_ops(shard: Shard, call: Call[OperationsQuery, None]) -> QueueOperations:
    query = call.query
    return await shard.history.queue_operations(time_range(query, _HOURS), _names(query), query.busiest)


@_series("queue-parked-replicas", Parked, QueueSeriesQuery, "The number of waiting pops", **_BY_QUEUE)
async def queue_parked(shard: Shard, call: Call[QueueSeriesQuery, None]) -> Parked:
    return await shard.history.parked(time_range(call.query, _HOURS), _names(call.query))


@_series(
    "retention",
    Retention,
    QueueSeriesQuery,
    "Messages removed by retention",
    Everywhere(_merge_retention),
    **_BY_QUEUE,
)
async def retention(shard: Shard, call: Call[QueueSeriesQuery, None]) -> Retention:
    return await shard.history.retention(time_range(call.query, _HOURS), call.query.queue)


@_series("rollup", RolledUp, RollupQuery, "What `queen pipeline rollup` wrote", names=names.by_query("queue", "group"))
async def rollup(shard: Shard, call: Call[RollupQuery, None]) -> RolledUp:
    query = call.query
    return await rollup_series(shard.broker.database, time_range(query, _HOURS), query.queue, query.group)


@routes.on_shard(
    "GET",
    "/api/v1/analytics/postgres-stats",
    access=Access.READ_ONLY,
    placement=Everywhere(_merge_postgres_stats),
    id="postgresStats",
    summary="Statistics of PostgreSQL",
    returns={200: PostgresStats},
    errors=DATABASE,
    cached=True,
)
async def statistics_of_postgres(shard: Shard, call: Call[None, None]) -> PostgresStats:
    return await postgres_stats(shard.broker.database)


def _names(query: QueueSeriesQuery) -> list[str] | None:
    """The queue that is asked for; None: all of them."""
    return [query.queue] if query.queue else None
