"""HTTP/1.1 on a bare transport: one `HttpProtocol` per connection, one `HttpServer` for what they share."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from queen.concurrency import EagerFuture
from queen.http.server.errors import RETRY_SOON, failure_response
from queen.http.server.handshakes import TlsListener
from queen.http.server.limits import (
    FLOODED_SECONDS,
    Address,
    Budget,
    Limits,
    Metered,
    OpenFiles,
    Unfinished,
    Unsent,
    Upgraded,
)
from queen.http.server.message import (
    BODILESS,
    Access,
    Handler,
    Request,
    Response,
    ResponseStream,
    UpgradeHandler,
    encode_head,
    encode_stream_head,
    error_response,
)
from queen.http.server.paced import PacedConnection
from queen.http.server.reader import HeadCache, RequestReader
from queen.http.server.router import Router
from queen.http.server.tls import common_name

Gate = Callable[[Request], Response | Awaitable[Response | None] | None]

CLOSE: Final = b"Connection: close\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

# Up to this size, copying a body behind its head is cheaper than sending it as a piece of its own.
JOINED_BODY_BYTES: Final = 16 * 1024
# What is decrypted at a time at most.
DECRYPTED_BYTES: Final = 256 * 1024
# Requests of one connection that are served before other connections are.
REQUESTS_AT_A_TIME: Final = 32
# Bytes of large bodies read before other connections have their turn.
TURN_BYTES: Final = 1 << 20
# From this size on a piece that arrives belongs to a large body.
LARGE_PIECE_BYTES: Final = 32 * 1024
READERS_IN_TURN: Final = 4
# Requests with a body up to this size get short answers, and are served whatever others do not read.
SMALL_BODY_BYTES: Final = 64 * 1024

log = logging.getLogger(__name__)


class HttpServer:
    """What all connections share: routes, limits, and the shutdown."""

    def __init__(
        self,
        router: Router,
        *,
        gate: Gate | None = None,
        header_lines: bytes = b"",
        lines_for: Callable[[Request], bytes] | None = None,
        admits_host: Callable[[bytes], bool] | None = None,
        check_head: Callable[[Request], Response | None] | None = None,
        limits: Limits | None = None,
        max_body_bytes: int = 64 * 1024 * 1024,
        max_head_bytes: int = 64 * 1024,
        idle_seconds: float = 75.0,
        arrival_seconds: float = 60.0,
        linger_seconds: float = 5.0,
        sweep_seconds: float = 1.0,
    ) -> None:
        """`gate` sees every request that has a route before the handler does, and may answer in its place, at once or
        after a while. `header_lines` are part of every answer, and what `lines_for` makes of a request that names
        an `Origin` part of its own. A request for a host that `admits_host` does not know is refused, and so is one
        for which `check_head` has an answer, before its body has come.

        A connection is closed after `idle_seconds` without a request, or without any progress in reading its
        answer. A request has `arrival_seconds` to arrive. A client that is refused and goes on sending is cut
        after `linger_seconds`. One sweep every `sweep_seconds` keeps all these times.
        """
        self.router = router
        self.heads = HeadCache()
        self.budget = Budget(limits or Limits())
        self.upgraded: dict[asyncio.Transport, Upgraded] = {}
        self.gate = gate
        self.header_lines = header_lines
        self.lines_for = lines_for
        self.admits_host = admits_host
        self.check_head = check_head
        self.max_body_bytes = max_body_bytes
        self.max_head_bytes = max_head_bytes
        self.idle_seconds = idle_seconds
        self.arrival_seconds = arrival_seconds
        self.linger_seconds = linger_seconds
        self.sweep_seconds = sweep_seconds
        self.connections: set[HttpProtocol] = set()
        self.tasks: set[asyncio.Future[Any]] = set()
        self.shutting_down: list[Callable[[], object]] = []
        self.closing = False
        self.now = 0.0
        self.decrypted = memoryview(bytearray(DECRYPTED_BYTES))
        self.statuses: dict[int, int] = {}
        """How many requests were answered, by status."""
        self._servers: list[asyncio.Server] = []
        self._listeners: list[TlsListener] = []
        self._read_in_turn = 0
        self._waiting_readers: deque[HttpProtocol] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._files = OpenFiles()
        self._empty = asyncio.Event()
        self._empty.set()

    async def serve(
        self,
        host: str,
        port: int,
        reuse_port: bool = True,
        tls: ssl.SSLContext | None = None,
        listening: socket.socket | None = None,
    ) -> asyncio.Server:
        """Listen for connections; port 0 takes a free one. `listening` is a socket that is bound already."""
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._sweep(loop)
        where: dict[str, Any] = {"host": host, "port": port, "reuse_port": reuse_port}
        server = await loop.create_server(
            lambda: HttpProtocol(self),
            backlog=2048,
            # With TLS it only binds.
            start_serving=tls is None,
            **(where if listening is None else {"sock": listening}),
        )
        self._servers.append(server)
        if tls is not None:
            listener = TlsListener(server.sockets, tls, self._over_tls, self._count_dropped)
            self._listeners.append(listener)
        return server

    async def shutdown(self, grace_seconds: float) -> None:
        """Stop listening, let what runs finish and be answered, and cut what is left after `grace_seconds`.

        Every callback in `shutting_down` is called first, so that parked requests can be answered at once.
        """
        self.closing = True
        for listener in self._listeners:
            listener.close()
        for server in self._servers:
            server.close()
        for callback in self.shutting_down:
            _call_safely(callback)
        for connection in tuple(self.connections):
            connection.close_if_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self.until_empty()
        for connection in tuple(self.connections):
            connection.abort()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.until_empty()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def until_empty(self) -> None:
        """Wait until there is no connection."""
        await self._empty.wait()

    def in_flight(self) -> int:
        """How many requests are being served."""
        return sum(1 for connection in self.connections if connection.busy)

    def open_connections(self) -> list[tuple[str, str]]:
        """The address of each client, and the route that serves its request, if any."""
        return [connection.serving() for connection in self.connections]

    def remember(self, connection: HttpProtocol) -> None:
        """Called by a connection that begins."""
        self.connections.add(connection)
        self._empty.clear()

    def forget(self, connection: HttpProtocol) -> None:
        """Called by a connection that is gone, or that another protocol has taken over."""
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def _over_tls(self) -> PacedConnection:
        return PacedConnection(HttpProtocol(self), self.decrypted)

    def _count_dropped(self) -> None:
        self.budget.refused["connections"] += 1

    def count_piece(self, connection: HttpProtocol, nbytes: int) -> None:
        """A connection has read a large piece; where all have read too much, it waits for the next turn of the loop."""
        if not self._read_in_turn:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._read_in_turn += nbytes
        if self._read_in_turn > TURN_BYTES and connection.wait_for_turn():
            self._waiting_readers.append(connection)

    def _end_turn(self) -> None:
        self._read_in_turn = 0
        for _ in range(min(len(self._waiting_readers), READERS_IN_TURN)):
            self._waiting_readers.popleft().go_on_reading()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        # Connections read this clock instead of asking for the time or setting timers of their own.
        self.now = loop.time()
        self._files.check()
        for transport, upgraded in list(self.upgraded.items()):
            if transport.is_closing():
                del self.upgraded[transport]
                upgraded.unsent.set(0)
                upgraded.unfinished.set(0)
                self.budget.leave(upgraded.peer, upgraded.address)
            elif upgraded.is_stuck(transport.get_write_buffer_size(), self.now):
                transport.abort()
        self._timer = loop.call_later(self.sweep_seconds, self._sweep, loop)
        for connection in tuple(self.connections):
            connection.keep_time()


class HttpProtocol(asyncio.BaseProtocol):
    """One connection. Its requests are served one at a time, in the order they came."""

    __slots__ = (
        "_address",
        "_client_name",
        "_connection_line",
        "_eof",
        "_lingering",
        "_message_seen",
        "_peer",
        "_pending",
        "_read_paused",
        "_reader",
        "_request",
        "_server",
        "_since",
        "_transport",
        "_unread",
        "_unsent",
        "_waits",
        "_write_paused",
    )

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._reader: RequestReader
        self._unread: Unsent
        self._request: Request | None = None
        self._connection_line = b""
        self._read_paused = False
        self._waits = False
        self._write_paused = False
        self._eof = False
        self._lingering = False
        self._since = server.now
        self._message_seen = 0
        self._unsent = 0
        self._client_name: str | None = None
        self._pending = False
        self._peer = ""
        self._address: Address | None = None

    def serving(self) -> tuple[str, str]:
        """The address of the client, and the route that serves its request; empty when none does."""
        request, peername = self._request, self._transport.get_extra_info("peername")
        peer = str(peername[0]) if isinstance(peername, tuple) else "local"
        if request is None:
            return peer, ""
        return peer, f"{request.method} {request.route.pattern if request.route else request.path}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self._server
        peername = transport.get_extra_info("peername")
        peer = str(peername[0]) if isinstance(peername, tuple) else "local"
        self._transport = cast(asyncio.Transport, transport)
        self._client_name = common_name(transport.get_extra_info("peercert"))
        self._peer, self._address = peer, server.budget.join(peer)
        self._unread = Unsent(server.budget, self._address)
        self._reader = RequestReader(
            server.router,
            server.max_head_bytes,
            server.max_body_bytes,
            peer,
            server.heads,
            server.budget,
            self._address,
        )
        self._reader.admits_host = server.admits_host
        if server.check_head is not None:
            self._reader.check_head = self._check_head
        server.remember(self)
        if server.closing:
            transport.close()
        else:
            self._refuse_excess(self._address)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        self._advance()
        if len(data) > LARGE_PIECE_BYTES:
            self._server.count_piece(self, len(data))

    def wait_for_turn(self) -> bool:
        """Read no more until it is this connection's turn again; whether it has to be given one."""
        if self._waits or self._transport.is_closing():
            return False
        self._waits = True
        if not self._read_paused:
            self._pause_reading(True)
        return True

    def go_on_reading(self) -> None:
        self._waits = False
        if self._read_paused:
            self._pause_reading_if_backlogged()

    def eof_received(self) -> bool:
        # A client that is gone looks like one that half-closed its connection: callbacks run, but what is being
        # served is still answered.
        self._eof = True
        if self._request is not None:
            self._request.disconnect()
        return self._request is not None or not self._reader.is_drained()

    def _check_head(self, request: Request) -> Response | None:
        request.client_name = self._client_name
        check = self._server.check_head
        refusal = check(request) if check is not None else None
        if refusal is not None:
            self._server.statuses[refusal.status] = self._server.statuses.get(refusal.status, 0) + 1
        return refusal

    def _refuse_excess(self, address: Address) -> None:
        """Reject a connection over the limit before it sends a request."""
        server = self._server
        limits = server.budget.limits
        if limits.connections and len(server.connections) + len(server.upgraded) > limits.connections:
            refusal = error_response(503, "The server has too many connections; try again", RETRY_SOON)
        elif limits.connections_per_address and address.connections > limits.connections_per_address:
            refusal = error_response(429, "This address has too many connections open", RETRY_SOON)
        else:
            return
        server.budget.refused["connections"] += 1
        server.statuses[refusal.status] = server.statuses.get(refusal.status, 0) + 1
        self._write(refusal, CLOSE, head_only=False)
        self._hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._eof = True
        self._reader.close()
        self._unread.set(0)
        if self._address is not None:
            self._server.budget.leave(self._peer, self._address)
            self._address = None
        self._server.forget(self)
        if self._request is not None:
            self._request.disconnect()

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._unread.set(self._transport.get_write_buffer_size())
        self._advance()

    def take_over(self, protocol: asyncio.Protocol) -> None:
        """Give the connection, and what the client sent after its upgrade request, to another protocol."""
        leftover = self._reader.leftover
        if leftover is None:
            raise RuntimeError("only the handler of an upgrade request may take its connection over")
        self._request = None
        self._reader.close()
        self._server.forget(self)
        if self._address is not None:
            unfinished = Unfinished(self._server.budget, self._address)
            self._server.upgraded[self._transport] = Upgraded(
                self._peer, self._address, self._unread, unfinished, self._server.now
            )
            self._address = None
            if isinstance(protocol, Metered):
                protocol.unsent, protocol.unfinished = self._unread, unfinished
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if leftover:
            protocol.data_received(bytes(leftover))
        if self._read_paused:
            self._pause_reading(False)

    @property
    def busy(self) -> bool:
        """Whether a request is being served."""
        return self._request is not None

    def close_if_idle(self) -> None:
        if self._request is None and self._reader.is_drained() and not self._reader.receiving and not self._lingering:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def keep_time(self) -> None:
        """Called by the sweep: end what has taken too long."""
        server, reader, transport = self._server, self._reader, self._transport
        waited = server.now - self._since
        unsent = transport.get_write_buffer_size()
        self._unread.set(unsent)
        if unsent:
            # An answer may take as long as it needs, as long as the client goes on reading it.
            if unsent != self._unsent:
                self._unsent = unsent
                self._since = server.now
            elif waited >= (FLOODED_SECONDS if self._unread.is_too_much else server.idle_seconds):
                transport.abort()
        elif self._lingering:
            if waited >= server.linger_seconds:
                transport.abort()
        elif self._request is not None:
            return
        elif not reader.receiving:
            if waited >= server.idle_seconds:
                transport.close()
        elif reader.messages_begun != self._message_seen:
            self._message_seen = reader.messages_begun
            self._since = server.now
        elif waited >= server.arrival_seconds:
            reader.refuse(408, f"The request did not arrive within {server.arrival_seconds:g} seconds")
            self._advance()

    def _advance(self) -> None:
        """Serve what can be served now; called after every change."""
        reader = self._reader
        if self._pending:
            return
        taken = 0
        while True:
            while reader.pending and self._request is None and not self._write_paused:
                if taken >= REQUESTS_AT_A_TIME:
                    # A client that pipelines its requests is one among others.
                    self._pending = True
                    asyncio.get_running_loop().call_soon(self._go_on)
                    self._pause_reading_if_backlogged()
                    return
                taken += 1
                self._serve_next()
            if not reader.unparsed or not reader.resume():
                break
        if self._request is None and not reader.pending:
            if reader.refusal is not None:
                refusal, reader.refusal = reader.refusal, None
                self._write(refusal, CLOSE, head_only=False)
                self._hang_up()
            elif reader.awaits_continue and not reader.body_bytes:
                reader.awaits_continue = False
                self._transport.write(CONTINUE)
        # Without a reason to pause, reading goes on while a request is served: that is how a disconnect is noticed.
        if reader.pending or reader.leftover is not None or self._read_paused:
            self._pause_reading_if_backlogged()

    def _go_on(self) -> None:
        self._pending = False
        self._advance()

    def _pause_reading_if_backlogged(self) -> None:
        reader = self._reader
        pause = reader.leftover is not None or reader.is_backlogged() or self._pending or self._waits
        if pause != self._read_paused:
            self._pause_reading(pause)

    def _pause_reading(self, pause: bool) -> None:
        if self._transport.is_closing():
            return
        self._read_paused = pause
        if pause:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _serve_next(self) -> None:
        request, handler, self._connection_line, upgrade = self._reader.take()
        self._request = request
        request.disconnected = self._eof
        request.client_name = self._client_name
        gate = self._server.gate
        result: object
        try:
            budget = self._server.budget
            if budget.outgoing > budget.alarm and (refusal := self._refuse_flood(request)) is not None:
                result = refusal
            elif gate is None or request.route is None or (result := gate(request)) is None:
                result = handler(request) if upgrade is None else upgrade(request, self)
            elif not isinstance(result, Response):
                result = self._after_gate(request, result, handler, upgrade)
        except Exception as error:
            result = failure_response(request, error)
        if isinstance(result, Response):
            self._answer(request, result)
        elif isinstance(result, asyncio.Future):
            self._follow(result)
        elif inspect.isawaitable(result):
            task = asyncio.ensure_future(result)
            self._server.tasks.add(task)
            task.add_done_callback(self._server.tasks.discard)
            self._follow(task)
        else:
            self._conclude(result)

    def _refuse_flood(self, request: Request) -> Response | None:
        """Answer what would bring more answers into memory than there is room for."""
        budget, route = self._server.budget, request.route
        if route is None or not route.access:
            return None
        if request.method != "GET" and len(request.body) <= SMALL_BODY_BYTES:
            return None
        if self._address is not None and budget.is_flooding(self._address):
            refusal = error_response(429, "This address has too many unread responses; read them first", RETRY_SOON)
        elif budget.is_flooded:
            refusal = error_response(503, "Clients have too many unread responses; try again", RETRY_SOON)
        else:
            return None
        budget.refused["outgoing"] += 1
        return refusal

    async def _after_gate(
        self,
        request: Request,
        gated: Awaitable[Response | None],
        handler: Handler,
        upgrade: UpgradeHandler | None,
    ) -> object:
        refusal = await gated
        if refusal is not None:
            return refusal
        result: object = handler(request) if upgrade is None else upgrade(request, self)
        return await result if inspect.isawaitable(result) else result

    def _follow(self, future: asyncio.Future[Any]) -> None:
        if future.done():
            self._settle(future)
        elif type(future) is EagerFuture:
            future.listener = self._on_eager_result
        else:
            future.add_done_callback(self._on_done)

    def _on_eager_result(self, future: asyncio.Future[Any]) -> None:
        """The response is written at once; pending requests are served in the next iteration of the loop."""
        self._settle(future)
        reader = self._reader
        if (
            reader.pending
            or reader.unparsed
            or reader.refusal is not None
            or self._read_paused
            or reader.awaits_continue
        ):
            asyncio.get_running_loop().call_soon(self._advance)

    def _on_done(self, future: asyncio.Future[Any]) -> None:
        self._settle(future)
        self._advance()

    def _settle(self, future: asyncio.Future[Any]) -> None:
        request = self._request
        try:
            # `result` would raise the error here: a cycle of its traceback, this frame and the future, in which all
            # that the handler has read would wait for the garbage collector.
            error = future.exception()
            result = future.result() if error is None else failure_response(request, error)
        except asyncio.CancelledError:
            if request is not None and request.disconnected:
                # It was cancelled because the client is gone.
                self._transport.close()
                return
            result = error_response(503, "The request was cancelled; try again", RETRY_SOON)
        self._conclude(result)

    def _conclude(self, result: object) -> None:
        request = self._request
        if request is None:
            return  # another protocol has the connection
        if isinstance(result, ResponseStream):
            self._open_stream(request, result)
            return
        if not isinstance(result, Response):
            log.error("%s %s: the handler returned %r instead of a response", request.method, request.path, result)
            result = error_response(500, "Internal server error")
        self._answer(request, result)

    def _open_stream(self, request: Request, stream: ResponseStream) -> None:
        """Begin an answer that lasts; the connection serves nothing else until it ends, and ends with it."""
        server = self._server
        server.statuses[200] = server.statuses.get(200, 0) + 1
        lines = CLOSE
        if server.lines_for is not None and b"origin" in request.headers:
            lines += server.lines_for(request)
        self._transport.write(encode_stream_head(stream.content_type, lines, server.header_lines))
        request.on_disconnect(self._transport.close)
        stream.on_open(_StreamWriter(self._transport))

    def _answer(self, request: Request, response: Response) -> None:
        server, reader = self._server, self._reader
        if len(response.body) > SMALL_BODY_BYTES and server.budget.is_flooded and _is_read_only(request):
            # It began before the memory was full. Nothing is lost with it: the client may retry.
            server.budget.refused["outgoing"] += 1
            response = error_response(503, "Clients have too many unread responses; try again", RETRY_SOON)
        status = response.status
        self._request = None
        reader.served()
        self._since = server.now
        server.statuses[status] = server.statuses.get(status, 0) + 1
        last = (reader.closed or self._eof or server.closing) and reader.is_drained() and reader.refusal is None
        lines = CLOSE if last else self._connection_line
        if server.lines_for is not None and b"origin" in request.headers:
            lines += server.lines_for(request)
        self._write(response, lines, request.method == "HEAD")
        if last:
            self._hang_up()

    def _write(self, response: Response, connection_line: bytes, head_only: bool) -> None:
        transport = self._transport
        if transport.is_closing():
            return
        try:
            head = encode_head(response, connection_line, self._server.header_lines)
        except ValueError:
            log.exception("response with status %d could not be encoded", response.status)
            response = error_response(500, "Internal server error")
            head = encode_head(response, connection_line, self._server.header_lines)
        body = response.body
        if head_only or not body or response.status in BODILESS:
            transport.write(head)
        elif len(body) <= JOINED_BODY_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
            self._unread.set(transport.get_write_buffer_size())

    def _hang_up(self) -> None:
        unread = self._reader.excess or self._reader.receiving
        self._reader.stop()
        # TLS has no end of sending without an end of receiving.
        if self._eof or not unread or self._transport.is_closing() or not self._transport.can_write_eof():
            self._transport.close()
            return
        # Closing with input unread makes the kernel reset the connection, and the client may lose the answer.
        self._lingering = True
        self._since = self._server.now
        self._transport.write_eof()


class _StreamWriter:
    """Writes an answer that lasts."""

    __slots__ = ("_transport",)

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    @property
    def unsent(self) -> int:
        return self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


def _is_read_only(request: Request) -> bool:
    return request.route is not None and request.route.access is Access.READ_ONLY


def _call_safely(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:
        log.exception("a shutdown callback failed")
