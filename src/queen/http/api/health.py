"""Is it alive, is it ready, does it reach its database?"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from queen import __version__
from queen.broker.broker import Broker
from queen.http.server.message import Request, Response, json_response
from queen.http.server.router import Access, Router


class QueenState(msgspec.Struct):
    """The worker that answered."""

    worker_id: int
    status: str


class Health(msgspec.Struct):
    """What `/health` says."""

    status: str
    database: str
    server: str
    worker_id: int
    version: str
    queen: QueenState


class Alive(msgspec.Struct):
    """What `/livez` says."""

    alive: bool
    worker_id: int


class Readiness(msgspec.Struct):
    """What `/readyz` says. `pushes` is `stored`, `buffered` (PostgreSQL is away, but pushes are kept) or `refused`."""

    ready: bool
    reasons: list[str]
    pushes: str
    worker_id: int


class HealthRoutes:
    """Liveness, readiness, and the health that clients and dashboards show.

    `buffers_pushes` says whether a push would be kept on disk while PostgreSQL is away.
    """

    def __init__(self, broker: Broker, buffers_pushes: Callable[[], bool] = lambda: False) -> None:
        self._probe = broker.database_probe
        self._worker_id = broker.worker_id
        self._buffers_pushes = buffers_pushes
        self._alive = json_response(200, Alive(True, broker.worker_id))
        self.stopping = False

    def add_to(self, router: Router) -> None:
        router.add("GET", "/health", self.health, Access.PUBLIC)
        router.add("GET", "/livez", self.livez, Access.PUBLIC)
        router.add("GET", "/readyz", self.readyz, Access.PUBLIC)

    async def health(self, request: Request) -> Response:
        connected = (await self._probe.now()).connected
        return json_response(
            200 if connected else 503,
            Health(
                status="healthy" if connected else "unhealthy",
                database="connected" if connected else "disconnected",
                server="Queen",
                worker_id=self._worker_id,
                version=__version__,
                queen=QueenState(self._worker_id, "stopping" if self.stopping else "active"),
            ),
        )

    def livez(self, request: Request) -> Response:
        """That this is answered at all is the answer: the event loop turns."""
        return self._alive

    async def readyz(self, request: Request) -> Response:
        """Whether requests should be sent here. 503 says why not."""
        database = await self._probe.recent()
        reasons = ["the server is shutting down"] if self.stopping else []
        if not database.usable:
            reasons.append(database.trouble)
        pushes = "stored" if database.usable else "buffered" if self._buffers_pushes() else "refused"
        return json_response(200 if not reasons else 503, Readiness(not reasons, reasons, pushes, self._worker_id))
