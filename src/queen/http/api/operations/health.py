"""Health probes: liveness, readiness, and the health that clients and dashboards show."""

from __future__ import annotations

import asyncio
from typing import Literal

from queen import __version__
from queen.http.auth.guard import open_access_warning
from queen.http.routing.call import Call, Reply
from queen.http.routing.context import Api
from queen.http.routing.route import RouteTable
from queen.http.server.message import Access
from queen.wire.api.operations.health import Alive, Health, Readiness, WorkerState

routes = RouteTable("Health")


@routes.on_worker(
    "GET",
    "/health",
    access=Access.PUBLIC,
    summary="Health of the server",
    description="503 when PostgreSQL does not answer within 1.5 s; with several shards, when none of them does.",
    returns={200: Health, 503: Health},
    example={
        "status": "healthy",
        "database": "connected",
        "server": "Queen",
        "worker_id": 0,
        "version": "0.1.0",
        "queen": {"worker_id": 0, "status": "active"},
    },
)
async def health(api: Api, call: Call[None, None]) -> Reply:
    states = await asyncio.gather(*(broker.database_probe.now() for broker in api.brokers))
    connected = [state.connected for state in states]
    worker_id = api.brokers[0].worker_id
    answer = Health(
        status="healthy" if all(connected) else "degraded" if any(connected) else "unhealthy",
        database="connected" if all(connected) else "degraded" if any(connected) else "disconnected",
        server="Queen",
        worker_id=worker_id,
        version=__version__,
        queen=WorkerState(worker_id, "stopping" if api.stopping else "active"),
    )
    return Reply(200 if any(connected) else 503, answer)


@routes.on_worker(
    "GET",
    "/livez",
    access=Access.PUBLIC,
    summary="Liveness probe",
    description="Answered as long as the worker's event loop runs; PostgreSQL is not queried.",
    returns={200: Alive},
    example={"alive": True, "worker_id": 0},
)
async def livez(api: Api, call: Call[None, None]) -> Alive:
    return Alive(True, api.brokers[0].worker_id)


@routes.on_worker(
    "GET",
    "/readyz",
    access=Access.PUBLIC,
    summary="Readiness probe",
    description="503 while PostgreSQL (with several shards: every one) is unavailable, the database lacks migrations, "
    "no key to verify tokens with could be fetched, or the server is shutting down; "
    "`reasons` says which, and `pushes` what becomes of a push meanwhile.",
    returns={200: Readiness, 503: Readiness},
    example={"ready": True, "reasons": [], "pushes": "stored", "worker_id": 0, "warnings": []},
)
async def readyz(api: Api, call: Call[None, None]) -> Reply:
    states = await asyncio.gather(*(broker.database_probe.recent() for broker in api.brokers))
    usable = [state.usable for state in states]
    reasons = ["the server is shutting down"] if api.stopping else []
    reasons += [
        state.problem if len(states) == 1 else f"shard {shard}: {state.problem}"
        for shard, state in enumerate(states)
        if not state.usable
    ]
    buffered = all(broker.spool.writer.healthy for broker in api.brokers)
    pushes: Literal["stored", "buffered", "refused"] = (
        "stored" if all(usable) else "buffered" if buffered else "refused"
    )
    if problem := api.key_problem():
        reasons.append(problem)
    ready = any(usable) and not api.stopping and not problem
    warnings = [text for text in (open_access_warning(api.settings),) if text]
    return Reply(200 if ready else 503, Readiness(ready, reasons, pushes, api.brokers[0].worker_id, warnings))
