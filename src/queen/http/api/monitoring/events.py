"""The stream of live counters and events."""

from __future__ import annotations

import time

from queen.http.routing.context import Api
from queen.http.routing.route import Media, RouteTable
from queen.http.server.message import Access, Request, Response, ResponseStream, StreamWriter
from queen.wire.api.monitoring.events import EventsQuery

routes = RouteTable("Status")

_TYPE = b"text/event-stream"
_SESSION_SECONDS = 60.0


@routes.direct(
    "GET",
    "/api/v1/events",
    access=Access.READ_ONLY,
    summary="Live counters and changes",
    description="Server-sent events: `counters` at once and every second, and changes within a second. The section on "
    "the event stream describes them. A client that reads too slowly is dropped.",
    query=EventsQuery,
    returns={200: Media("text/event-stream")},
    streams=True,
)
def events(api: Api, request: Request) -> Response | ResponseStream:
    if request.method == "HEAD":
        return Response(200, content_type=_TYPE)
    principal = request.principal
    expires = principal.expires if principal is not None else float("inf")
    if principal is not None and principal.is_live is not None:
        # A session may be ended before; browsers come back by themselves.
        expires = min(expires, time.time() + _SESSION_SECONDS)

    def open_stream(writer: StreamWriter) -> None:
        listener = api.live.join(writer, seconds=expires - time.time(), limit=request.args.limit)
        request.on_disconnect(lambda: api.live.leave(listener))

    return ResponseStream(_TYPE, open_stream)
