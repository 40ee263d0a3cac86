"""Descriptions of the probes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from queen.http.api.health import Alive, Health, Readiness
from queen.http.openapi.operation import Operation

OPERATIONS: Final[Mapping[str, Operation]] = {
    "GET /health": Operation(
        id="health",
        summary="Is it healthy?",
        description="503 when PostgreSQL does not answer within 1.5 s.",
        tag="Health",
        answers={200: Health, 503: Health},
        example={
            "status": "healthy",
            "database": "connected",
            "server": "Queen",
            "worker_id": 0,
            "version": "0.1.0",
            "queen": {"worker_id": 0, "status": "active"},
        },
    ),
    "GET /livez": Operation(
        id="livez",
        summary="Is it alive?",
        description="Answered as long as the worker's event loop turns; PostgreSQL is not asked.",
        tag="Health",
        answers={200: Alive},
        example={"alive": True, "worker_id": 0},
    ),
    "GET /readyz": Operation(
        id="readyz",
        summary="Should requests be sent here?",
        description="503 while PostgreSQL is away, the database lacks migrations, or the server is shutting down; "
        "`reasons` says which, and `pushes` what becomes of a push meanwhile.",
        tag="Health",
        answers={200: Readiness, 503: Readiness},
        example={"ready": True, "reasons": [], "pushes": "stored", "worker_id": 0},
    ),
}
