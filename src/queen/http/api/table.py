"""All routes, and the handlers that serve them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from queen.http.api import openapi
from queen.http.api.messages import browse, consume, dead_letters, messaging, reading, stages, traces
from queen.http.api.monitoring import analytics, events, metrics, status
from queen.http.api.operations import audit, cluster, health, maintenance, migration, pipelines, shards, system
from queen.http.api.resources import ephemeral, groups, queues, state, streams, tasks, topics
from queen.http.routing.call import Call
from queen.http.routing.context import Api, Shard
from queen.http.routing.route import Operation, bind_shard, bind_worker, parse_query, serving
from queen.http.routing.view_cache import cached
from queen.http.server.message import Connection, Handler, Request, Response, UpgradeHandler
from queen.http.server.router import Router
from queen.single_flight import SingleFlightCache

if TYPE_CHECKING:
    from queen.broker.sharding.shard_router import ShardRouter

_MODULES: Final = (
    messaging,
    consume,
    queues,
    groups,
    browse,
    reading,
    dead_letters,
    traces,
    maintenance,
    audit,
    status,
    events,
    analytics,
    metrics,
    streams,
    stages,
    state,
    ephemeral,
    topics,
    tasks,
    cluster,
    pipelines,
    system,
    shards,
    migration,
    health,
    openapi,
)


def all_routes() -> list[Operation]:
    """Every route of the server, as it is declared beside its handler."""
    return [operation for module in _MODULES for operation in module.routes.operations]


def add_routes(
    router: Router,
    api: Api,
    shards: Sequence[Shard],
    views: SingleFlightCache[Response],
    shard_router: ShardRouter | None = None,
) -> None:
    """Bind every handler to the worker or its shard, and add it to the router; `shard_router`: there are several."""
    for operation in all_routes():
        handler = _bind(operation, api, shards, shard_router)
        if operation.cached:
            handler = cached(handler, views)
        router.add(
            operation.method,
            operation.path,
            handler,
            operation.access_of(api),
            upgrade=_bind_upgrade(operation, api),
            parse_query=parse_query(operation),
            declaration=operation,
            streams=operation.streams,
        )
    api.routes = router.routes


def _bind(operation: Operation, api: Api, shards: Sequence[Shard], shard_router: ShardRouter | None) -> Handler:
    if operation.kind != "shard":
        return bind_worker(operation, api)
    if shard_router is None:
        return bind_shard(operation, shards[0])
    placement = operation.placement
    assert placement is not None, f"{operation.key} has no placement"

    def invoke(shard: int, call: Call[Any, Any]) -> Any:
        return operation.handler(shards[shard], call)

    return serving(operation, lambda call: placement.run(shard_router, invoke, call))


def _bind_upgrade(operation: Operation, api: Api) -> UpgradeHandler | None:
    upgrade = operation.upgrade
    if upgrade is None:
        return None

    def serve(request: Request, connection: Connection) -> Response | None:
        return upgrade(api, request, connection)

    return serve
