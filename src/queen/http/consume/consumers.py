"""Consumers on WebSockets: accepting their connections, and closing them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from websockets.datastructures import Headers as HandshakeHeaders
from websockets.exceptions import NegotiationError
from websockets.extensions.permessage_deflate import ServerPerMessageDeflateFactory
from websockets.http11 import Request as HandshakeRequest
from websockets.protocol import Protocol, Side
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from queen.broker.broker import Broker
from queen.http.auth.browser import is_admitted
from queen.http.auth.resources import ConsumerLimits
from queen.http.consume.session import Session
from queen.http.server.errors import RETRY_SOON
from queen.http.server.message import Connection, Request, Response, error_response
from queen.http.server.websocket import CLOSE_SECONDS, Limits, WebSocket

if TYPE_CHECKING:
    from queen.broker.sharding.sharded_broker import ShardedBroker

PROTOCOL: Final = Subprotocol("queen.v1")

log = logging.getLogger(__name__)


class Consumers:
    """Every connection that was made by `GET /ws/v1/consume`."""

    def __init__(
        self,
        broker: Broker | ShardedBroker,
        limits_of: Callable[[Request], ConsumerLimits | None] = lambda request: None,
    ) -> None:
        """`limits_of` says what a client that connects may consume; None: everything."""
        self._limits_of = limits_of
        settings = broker.settings
        self._broker = broker
        self._limits = Limits(
            settings.websocket_buffer_bytes, settings.websocket_ping_ms / 1000, settings.websocket_pong_ms / 1000
        )
        self._extensions = [ServerPerMessageDeflateFactory()] if settings.websocket_compression else None
        self._drain_seconds = settings.websocket_drain_ms / 1000
        self._sweep_seconds = min(1.0, self._limits.ping_seconds / 2, self._limits.pong_seconds / 2)
        self._sessions: dict[WebSocket, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._empty = asyncio.Event()
        self._empty.set()
        # Connections that open and close are not logged.
        self._frame_log = log.getChild("frames")
        self._frame_log.setLevel(logging.WARNING)

    @property
    def connections(self) -> int:
        return len(self._sessions)

    def accept(self, request: Request, connection: Connection) -> Response | None:
        """Upgrade a connection, or answer with why not."""
        if self._closing:
            return error_response(503, "The server is shutting down; connect again", RETRY_SOON)
        origin = request.headers.get(b"origin")
        host = request.headers.get(b"host", b"").decode("latin-1")
        admitted = self._broker.settings.websocket_origins
        if not is_admitted(origin.decode("latin-1") if origin is not None else None, host, admitted):
            return error_response(403, "Pages of this origin may not connect (see WEBSOCKET_ORIGINS)")
        negotiation = ServerProtocol(
            extensions=self._extensions, select_subprotocol=_choose_protocol, logger=self._frame_log
        )
        handshake = negotiation.accept(_as_handshake(request))
        if handshake.status_code != 101:
            return error_response(handshake.status_code, (handshake.body or b"").decode().strip())
        most = self._broker.settings.websocket_max_message_bytes
        frames = Protocol(Side.SERVER, max_size=most, logger=self._frame_log)
        frames.extensions = negotiation.extensions
        begin = partial(self._begin, self._limits_of(request))
        connection.take_over(WebSocket(frames, handshake.serialize(), self._limits, begin, self._lost))
        return None

    async def shutdown(self) -> None:
        """Give consumers a grace period to finish, and close every connection."""
        self._closing = True
        for session in list(self._sessions.values()):
            session.drain(self._drain_seconds)
        await self._until_empty(self._drain_seconds)
        for session in list(self._sessions.values()):
            session.close()
        await self._until_empty(CLOSE_SECONDS)
        for socket in list(self._sessions):
            socket.abort()
        await self._empty.wait()
        # What was released for those that are gone has to be stored before the database is closed.
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _until_empty(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._empty.wait()

    def _begin(self, limits: ConsumerLimits | None, socket: WebSocket) -> Session:
        session = self._sessions[socket] = Session(self._broker, socket, self._spawn, limits)
        self._empty.clear()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._sweep_seconds, self._sweep)
        return session

    def _lost(self, socket: WebSocket) -> None:
        self._sessions.pop(socket, None)
        if not self._sessions:
            self._empty.set()

    def _sweep(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for socket, session in list(self._sessions.items()):
            try:
                socket.keep_time(now)
                session.keep_time(now)
            except Exception:
                # The other consumers are pinged, and notified of expired leases, as before.
                log.exception("sweep of a WebSocket consumer failed")
        if self._sessions:
            self._timer = loop.call_later(self._sweep_seconds, self._sweep)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _choose_protocol(frames: ServerProtocol, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    """The only one there is; a client that offers none gets none."""
    if not offered:
        return None
    if PROTOCOL not in offered:
        raise NegotiationError(f"the protocol spoken here is {PROTOCOL}: offer it, besides any bearer.<token>")
    return PROTOCOL


def _as_handshake(request: Request) -> HandshakeRequest:
    headers = HandshakeHeaders()
    for name, value in request.headers.items():
        headers[name.decode("latin-1")] = value.decode("latin-1")
    return HandshakeRequest(request.path, headers, request.method)
