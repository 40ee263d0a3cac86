"""Streaming queries: registering them, their cycles, their state."""

from __future__ import annotations

from queen.broker.broker import Broker
from queen.broker.transactions.stream_queries import HashMismatch
from queen.errors import BadRequest
from queen.http.server.message import Request, Response, json_response
from queen.http.server.router import Access, Router
from queen.wire.streams import decode_cycle, decode_registration, decode_state_query


class StreamRoutes:
    """What the streaming SDKs call."""

    def __init__(self, broker: Broker) -> None:
        self._queries = broker.stream_queries
        self._cycles = broker.stream_cycles

    def add_to(self, router: Router) -> None:
        router.add("POST", "/streams/v1/queries", self.register, Access.READ_WRITE)
        router.add("POST", "/streams/v1/cycle", self.cycle, Access.READ_WRITE)
        router.add("POST", "/streams/v1/state/get", self.state, Access.READ_ONLY)

    async def register(self, request: Request) -> Response:
        registration = decode_registration(request.body)
        try:
            return json_response(200, await self._queries.register(registration))
        except HashMismatch as error:
            conflict = {
                "success": False,
                "query_id": error.query_id,
                "name": registration.name,
                "error": str(error),
            }
            return json_response(409, conflict)

    async def cycle(self, request: Request) -> Response:
        return json_response(200, await self._cycles.run(decode_cycle(request.body)))

    async def state(self, request: Request) -> Response:
        try:
            return json_response(200, await self._queries.state(decode_state_query(request.body)))
        except BadRequest as error:
            return json_response(400, {"success": False, "error": str(error)})
