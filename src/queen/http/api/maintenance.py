"""Maintenance modes, and what waits in the spool."""

from __future__ import annotations

from typing import Any

from queen.broker.broker import Broker
from queen.broker.heartbeat import Mode
from queen.errors import BadRequest
from queen.http.server.message import Request, Response, json_response
from queen.http.server.router import Access, Router
from queen.wire.ack import decode_object


class MaintenanceRoutes:
    """Switches for operators."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def add_to(self, router: Router) -> None:
        router.add("GET", "/api/v1/system/maintenance", self.modes, Access.ADMIN)
        router.add("POST", "/api/v1/system/maintenance", self.switch_pushes, Access.ADMIN)
        router.add("GET", "/api/v1/system/maintenance/pop", self.pop_mode, Access.ADMIN)
        router.add("POST", "/api/v1/system/maintenance/pop", self.switch_pops, Access.ADMIN)
        router.add("GET", "/api/v1/status/buffers", self.buffers, Access.READ_ONLY)

    def modes(self, request: Request) -> Response:
        stats, modes = self._broker.spool.stats(), self._broker.modes
        return json_response(
            200,
            {
                "maintenanceMode": modes.push_maintenance,
                "popMaintenanceMode": modes.pop_maintenance,
                "bufferedMessages": stats.messages,
                "bufferHealthy": stats.healthy,
                "bufferStats": {
                    "pendingCount": stats.messages,
                    "failedCount": stats.failed_records,
                    "dbHealthy": self._database_healthy,
                    "pendingBytes": stats.bytes,
                    "oldestSeconds": round(stats.oldest_seconds, 3),
                    "failedFiles": {
                        "count": stats.failed_records,
                        "totalBytes": stats.failed_bytes,
                        "totalMB": round(stats.failed_bytes / (1 << 20), 3),
                        "failoverCount": stats.failed_records,
                        "qos0Count": 0,
                    },
                },
            },
        )

    async def switch_pushes(self, request: Request) -> Response:
        enabled = _enabled(request)
        await self._broker.switch(Mode.PUSH_MAINTENANCE, enabled)
        stats = self._broker.spool.stats()
        return json_response(
            200,
            {
                "maintenanceMode": enabled,
                "bufferedMessages": stats.messages,
                "bufferHealthy": stats.healthy,
                "message": "Pushes go to the spool and stay there until maintenance is switched off"
                if enabled
                else "Pushes go to PostgreSQL; what waits in the spool is being replayed",
            },
        )

    def pop_mode(self, request: Request) -> Response:
        return json_response(200, _pop_answer(self._broker.modes.pop_maintenance))

    async def switch_pops(self, request: Request) -> Response:
        enabled = _enabled(request)
        await self._broker.switch(Mode.POP_MAINTENANCE, enabled)
        return json_response(200, _pop_answer(enabled))

    def buffers(self, request: Request) -> Response:
        stats = self._broker.spool.stats()
        return json_response(
            200,
            {
                "pending": stats.messages,
                "failed": stats.failed_records,
                "dbHealthy": self._database_healthy,
                "worker": self._broker.worker_id,
            },
        )

    @property
    def _database_healthy(self) -> bool:
        return not self._broker.database.availability.down and not self._broker.spool.board.trouble


def _enabled(request: Request) -> bool:
    enabled = decode_object(request.body).get("enabled")
    if not isinstance(enabled, bool):
        raise BadRequest("enabled (boolean) is required")
    return enabled


def _pop_answer(enabled: bool) -> dict[str, Any]:
    message = "Pops are answered empty" if enabled else "Pops are served"
    return {"popMaintenanceMode": enabled, "message": message}
