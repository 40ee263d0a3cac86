"""Health of a worker with several shards: one that is dead is no reason to send requests elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from queen import __version__
from queen.broker.broker import Broker
from queen.http.api.health import Health, HealthRoutes, QueenState, Readiness
from queen.http.server.message import Request, Response, json_response


class ShardsHealth(HealthRoutes):
    """Ready as long as one shard can be used; the reasons tell which ones cannot."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        super().__init__(brokers[0])
        self._brokers = brokers

    async def health(self, request: Request) -> Response:
        states = await asyncio.gather(*(broker.database_probe.now() for broker in self._brokers))
        connected = [state.connected for state in states]
        return json_response(
            200 if any(connected) else 503,
            Health(
                status="healthy" if all(connected) else "degraded" if any(connected) else "unhealthy",
                database="connected" if all(connected) else "degraded" if any(connected) else "disconnected",
                server="Queen",
                worker_id=self._worker_id,
                version=__version__,
                queen=QueenState(self._worker_id, "stopping" if self.stopping else "active"),
            ),
        )

    async def readyz(self, request: Request) -> Response:
        states = await asyncio.gather(*(broker.database_probe.recent() for broker in self._brokers))
        usable = [state.usable for state in states]
        reasons = ["the server is shutting down"] if self.stopping else []
        reasons += [f"shard {shard}: {state.trouble}" for shard, state in enumerate(states) if not state.usable]
        buffered = all(broker.spool.writer.healthy for broker in self._brokers)
        pushes = "stored" if all(usable) else "buffered" if buffered else "refused"
        ready = any(usable) and not self.stopping
        return json_response(200 if ready else 503, Readiness(ready, reasons, pushes, self._worker_id))
