"""Is it alive, and does it reach its database?"""

from __future__ import annotations

import asyncio

import asyncpg

from queen import __version__
from queen.broker.broker import Broker
from queen.errors import QueenError
from queen.http.message import Request, Response, json_response
from queen.http.router import Access, Router

_PATIENCE_SECONDS = 2.0


class HealthRoutes:
    """Liveness and readiness."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        # A connection of its own: to wait for one of the pool says nothing about the database.
        self._link = broker.database.link()

    def add_to(self, router: Router) -> None:
        router.add("GET", "/health", self.health, Access.PUBLIC)

    async def health(self, request: Request) -> Response:
        connected = await self._reaches_database()
        return json_response(
            200 if connected else 503,
            {
                "status": "healthy" if connected else "unhealthy",
                "database": "connected" if connected else "disconnected",
                "server": "Queen",
                "worker_id": self._broker.worker_id,
                "version": __version__,
            },
        )

    async def _reaches_database(self) -> bool:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._link.fetch("ping")
        except (TimeoutError, QueenError, asyncpg.PostgresError):
            return False
        return True
