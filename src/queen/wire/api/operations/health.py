"""Structs of the health probes."""

from __future__ import annotations

from typing import Literal

from queen.wire.fields import SnakeAnswer


class WorkerState(SnakeAnswer):
    """The worker that answered."""

    worker_id: int
    status: Literal["active", "stopping"]


class Health(SnakeAnswer):
    """The health of the server; `degraded`: some shards are unavailable."""

    status: Literal["healthy", "degraded", "unhealthy"]
    database: Literal["connected", "degraded", "disconnected"]
    server: str
    worker_id: int
    version: str
    queen: WorkerState


class Alive(SnakeAnswer):
    """That the event loop of the worker runs."""

    alive: bool
    worker_id: int


class Readiness(SnakeAnswer):
    """Whether to send requests here. `pushes` is `stored`, `buffered` (PostgreSQL is unavailable, but the spool is not)
    or `refused`.
    """

    ready: bool
    reasons: list[str]
    pushes: Literal["stored", "buffered", "refused"]
    worker_id: int
    warnings: list[str]
    """Warnings for operators, such as that authentication is off."""
