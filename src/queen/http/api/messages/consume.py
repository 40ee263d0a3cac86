"""Consuming over a WebSocket."""

from __future__ import annotations

from queen.errors import BadRequest
from queen.http.auth import names
from queen.http.routing.context import Api
from queen.http.routing.route import RouteTable
from queen.http.server.message import Access, Connection, Request, Response, error_response
from queen.http.server.router import upgrade_required
from queen.wire.api.messages.messaging import ConsumeQuery
from queen.wire.decode import check_known, field_names

routes = RouteTable("Messaging")


def _accept(api: Api, request: Request, connection: Connection) -> Response | None:
    try:
        check_known(request.query, field_names(ConsumeQuery), what="query parameter")
    except BadRequest as error:
        return error_response(400, str(error))
    return api.consumers.accept(request, connection)


@routes.direct(
    "GET",
    "/ws/v1/consume",
    access=Access.READ_WRITE,
    names=names.each_subscription,
    of_groups=False,
    summary="Consume over a WebSocket",
    description="Switches to the WebSocket protocol `queen.v1`: subscribe, receive batches as they arrive, ack, nack "
    "and renew on one connection. A browser, which cannot set headers, offers its token as the subprotocol "
    "`bearer.<token>` or in `?token=`. The page on WebSockets describes the messages.",
    query=ConsumeQuery,
    returns={101: None},
    errors=(400, 403, 426, 503),
    upgrade=_accept,
)
def consume(api: Api, request: Request) -> Response:
    return upgrade_required(request)
