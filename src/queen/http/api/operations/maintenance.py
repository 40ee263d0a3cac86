"""Maintenance modes, and the state of the spool."""

from __future__ import annotations

from typing import Final

from queen.broker.broker import Broker
from queen.broker.heartbeat import Mode
from queen.http.routing.call import Call
from queen.http.routing.context import Shard
from queen.http.routing.placement import Everywhere, summed
from queen.http.routing.route import DATABASE, RouteTable
from queen.http.server.message import Access
from queen.wire.api.operations.maintenance import (
    Buffers,
    BufferStats,
    FailedFiles,
    Maintenance,
    PopMaintenance,
    PushMaintenance,
    Switch,
    decode_switch,
)

routes = RouteTable("System")

_PATH: Final = "/api/v1/system/maintenance"


@routes.on_shard(
    "GET",
    _PATH,
    access=Access.ADMIN,
    placement=Everywhere(summed),
    summary="Maintenance modes and the state of the spool",
    returns={200: Maintenance},
)
async def maintenance(shard: Shard, call: Call[None, None]) -> Maintenance:
    stats, modes = shard.broker.spool.stats(), shard.broker.modes
    failed = FailedFiles(
        stats.failed_records,
        stats.failed_bytes,
        round(stats.failed_bytes / (1 << 20), 3),
        stats.failed_records,
        0,
    )
    return Maintenance(
        modes.push_maintenance,
        modes.pop_maintenance,
        stats.messages,
        stats.healthy,
        BufferStats(
            stats.messages,
            stats.failed_records,
            _database_healthy(shard.broker),
            stats.bytes,
            round(stats.oldest_seconds, 3),
            failed,
        ),
    )


@routes.on_shard(
    "POST",
    _PATH,
    access=Access.ADMIN,
    placement=Everywhere(summed, required=True),
    summary="Switch push maintenance on or off",
    description="While it is on, pushes are kept on disk and answered `buffered`; when it is switched off they are "
    "replayed to PostgreSQL, in order. Applies to every server of the database, and across restarts.",
    body=Switch,
    decode=decode_switch,
    body_example={"enabled": True},
    returns={200: PushMaintenance},
    errors=DATABASE,
)
async def switch_maintenance(shard: Shard, call: Call[None, Switch]) -> PushMaintenance:
    enabled = call.body.enabled
    await shard.broker.switch(Mode.PUSH_MAINTENANCE, enabled)
    stats = shard.broker.spool.stats()
    message = (
        "Pushes go to the spool until maintenance is switched off"
        if enabled
        else "Pushes go to PostgreSQL; the spool is being replayed"
    )
    return PushMaintenance(enabled, stats.messages, stats.healthy, message)


@routes.on_shard(
    "GET",
    f"{_PATH}/pop",
    access=Access.ADMIN,
    placement=Everywhere(summed),
    summary="Whether pop maintenance is on",
    returns={200: PopMaintenance},
)
async def pop_maintenance(shard: Shard, call: Call[None, None]) -> PopMaintenance:
    return _pop_mode(shard.broker.modes.pop_maintenance)


@routes.on_shard(
    "POST",
    f"{_PATH}/pop",
    access=Access.ADMIN,
    placement=Everywhere(summed, required=True),
    summary="Switch pop maintenance on or off",
    description="While it is on, pops are answered empty at once. Pushes go on.",
    body=Switch,
    decode=decode_switch,
    body_example={"enabled": True},
    returns={200: PopMaintenance},
    errors=DATABASE,
)
async def switch_pop_maintenance(shard: Shard, call: Call[None, Switch]) -> PopMaintenance:
    await shard.broker.switch(Mode.POP_MAINTENANCE, call.body.enabled)
    return _pop_mode(call.body.enabled)


@routes.on_shard(
    "GET",
    "/api/v1/status/buffers",
    access=Access.READ_ONLY,
    placement=Everywhere(summed),
    tag="Status",
    summary="Messages in the spool of this host",
    returns={200: Buffers},
    example={"pending": 0, "failed": 0, "dbHealthy": True, "worker": 0},
)
async def buffers(shard: Shard, call: Call[None, None]) -> Buffers:
    stats = shard.broker.spool.stats()
    return Buffers(stats.messages, stats.failed_records, _database_healthy(shard.broker), shard.broker.worker_id)


def _database_healthy(broker: Broker) -> bool:
    return not broker.database.availability.down and not broker.spool.state.outage


def _pop_mode(enabled: bool) -> PopMaintenance:
    return PopMaintenance(enabled, "Pops are answered empty" if enabled else "Pops are served")
