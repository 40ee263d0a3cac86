"""Description of the WebSocket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from queen.http.openapi.operation import Operation, Parameter

OPERATIONS: Final[Mapping[str, Operation]] = {
    "GET /ws/v1/consume": Operation(
        id="consume",
        summary="Consume over a WebSocket",
        description="Switches to the WebSocket protocol `queen.v1`: subscribe, receive batches as they arrive, ack, "
        "nack and renew on one connection. A browser, which cannot set headers, offers its token as the subprotocol "
        "`bearer.<token>` or in `?token=`. The page on WebSockets describes the messages.",
        tag="Messaging",
        parameters=(Parameter("token", "A bearer token, for clients that can set no header."),),
        answers={101: None},
        errors=(400, 403, 426, 503),
    ),
}
