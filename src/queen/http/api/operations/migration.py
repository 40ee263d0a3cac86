"""Copying everything to another PostgreSQL: test, start, follow, compare."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET

from queen.broker.maintenance.database_copy import DatabaseCopy, Target, TargetFailed
from queen.errors import BadRequest, Conflict
from queen.http.routing.call import Call
from queen.http.routing.context import Api
from queen.http.routing.route import DATABASE, RouteTable
from queen.http.server.message import Access
from queen.wire.api.operations.migration import (
    ConnectionTest,
    MigrationReset,
    MigrationStart,
    MigrationStarted,
    MigrationStatus,
    MigrationTarget,
    MigrationValidation,
    TableComparison,
)

routes = RouteTable("System")

_PATH: Final = "/api/v1/migration"
_EXAMPLE: Final = {"host": "db-new.internal", "database": "queen", "user": "queen", "password": "secret", "ssl": True}


@routes.on_worker(
    "POST",
    f"{_PATH}/test-connection",
    access=Access.ADMIN,
    id="testMigrationTarget",
    summary="Whether a PostgreSQL can be reached",
    body=MigrationTarget,
    body_example=_EXAMPLE,
    returns={200: ConnectionTest},
)
async def test_connection(api: Api, call: Call[None, MigrationTarget]) -> ConnectionTest:
    try:
        version = await _target(call.body).version()
    except TargetFailed as error:
        return ConnectionTest(success=False, message="Connection failed", error=str(error))
    return ConnectionTest(success=True, message="Connection successful", version=version)


@routes.on_worker(
    "POST",
    f"{_PATH}/start",
    access=Access.ADMIN,
    id="startMigration",
    summary="Copy everything to another PostgreSQL",
    description="Replaces the schemas `queen` and `queen_proxy` of the target by a copy of those of this server, with "
    "pg_dump and pg_restore on its host. Push and pop maintenance have to be on. The copy goes on when the client "
    "disconnects; one that fails leaves no part of it in the target. This server is only read.",
    body=MigrationStart,
    body_example={**_EXAMPLE, "excludeTableData": ["traces"]},
    returns={202: MigrationStarted},
    errors=(409, 503),
)
async def start_migration(api: Api, call: Call[None, MigrationStart]) -> MigrationStarted:
    target = _target(call.body, "target ")
    await _copy(api).start(target, call.body.exclude_table_data)
    return MigrationStarted("started", f"Everything is being copied to {target}; see {_PATH}/status")


@routes.on_worker(
    "GET",
    f"{_PATH}/status",
    access=Access.ADMIN,
    id="getMigrationStatus",
    summary="How far the last copy is",
    description="The same at every worker. A copy whose worker has died is an `error`.",
    returns={200: MigrationStatus},
    errors=DATABASE,
)
async def migration_status(api: Api, call: Call[None, None]) -> MigrationStatus:
    state = await api.database_copy.state()
    return MigrationStatus(
        status=state.status,
        current_step=state.step,
        elapsed_seconds=round(state.elapsed, 3),
        error=state.error or UNSET,
        dump_output=state.dump_output or UNSET,
        restore_output=state.restore_output or UNSET,
    )


@routes.on_worker(
    "POST",
    f"{_PATH}/validate",
    access=Access.ADMIN,
    id="validateMigration",
    summary="Compare the rows of every table with those of the target",
    description="Tables that servers write also during maintenance (audit log, metrics) are compared with what they "
    "held when they were copied; of what was left behind, the target must hold nothing.",
    body=MigrationTarget,
    body_example=_EXAMPLE,
    returns={200: MigrationValidation},
    errors=(409, 503),
)
async def validate_migration(api: Api, call: Call[None, MigrationTarget]) -> MigrationValidation:
    target = _target(call.body, "target ")
    try:
        compared = await _copy(api).compare(target)
    except TargetFailed as error:
        raise BadRequest(f"the target cannot be read: {error}") from error
    tables = [TableComparison(one.table, one.source, one.target, one.match) for one in compared]
    return MigrationValidation(True, all(one.match for one in tables), tables)


@routes.on_worker(
    "POST",
    f"{_PATH}/reset",
    access=Access.ADMIN,
    id="resetMigration",
    summary="Forget the last copy",
    returns={200: MigrationReset},
    errors=(409, 503),
)
async def reset_migration(api: Api, call: Call[None, None]) -> MigrationReset:
    await api.database_copy.reset()
    return MigrationReset("idle", "Migration state reset")


def _target(body: MigrationTarget, whose: str = "") -> Target:
    if not (body.host and body.database and body.user):
        raise BadRequest(f"{whose}host, database, and user are required")
    return Target.of(body.host, body.port, body.database, body.user, body.password, body.ssl)


def _copy(api: Api) -> DatabaseCopy:
    if len(api.brokers) > 1:
        raise Conflict(
            f"there are {len(api.brokers)} shards, and one database is copied; add the new PostgreSQL to DATABASE_URLS"
            " and move queues and topics to it (queen shards move), or use queen backup and queen restore"
        )
    return api.database_copy
