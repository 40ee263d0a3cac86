"""Reading whole logs by offset, which consumes nothing."""

from __future__ import annotations

from queen.broker.broker import Broker
from queen.broker.inspect.log_reader import LogReader
from queen.http.api.params import path_name, read_time
from queen.http.server.message import Request, Response, json_response
from queen.http.server.router import Access, Router
from queen.wire.segment import MEDIA_TYPE

_FARTHEST = (1 << 63) - 1


class ReadingRoutes:
    """Where the logs of a queue begin and end, and the segments between."""

    def __init__(self, broker: Broker) -> None:
        self._reader = LogReader(broker.database, broker.catalog.shard, broker.envelope)

    def add_to(self, router: Router) -> None:
        router.add("GET", "/api/v1/read/{queue}", self.positions, Access.READ_ONLY)
        router.add("GET", "/api/v1/read/{queue}/partition/{partition}", self.segments, Access.READ_ONLY)

    async def positions(self, request: Request) -> Response:
        queue = path_name(request, "queue")
        positions = await self._reader.positions(queue, read_time(request, "at"))
        return json_response(200, {"queue": queue, "partitions": positions})

    async def segments(self, request: Request) -> Response:
        queue, partition = path_name(request, "queue"), path_name(request, "partition")
        start = min(_FARTHEST, max(0, request.query_int("from", 0)))
        end = min(_FARTHEST, max(0, request.query_int("to", _FARTHEST)))
        frames = await self._reader.segments(queue, partition, start, end)
        return Response(200, frames, MEDIA_TYPE.encode())
