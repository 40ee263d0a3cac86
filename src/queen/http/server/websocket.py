"""WebSocket on a transport that HTTP has handed over: one `WebSocket` per connection, and the `Endpoint` behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast
from typing import Protocol as Interface

from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import Protocol, State

from queen.http.server.limits import Metered

# Bytes parsed before other connections have their turn: they may hold hundreds of frames.
SLICE_BYTES: Final = 4 * 1024
# A message in more fragments than this has to have some bytes in each, as the body of a request in its chunks.
MOST_SMALL_FRAGMENTS: Final = 4096
SMALL_FRAGMENT_BYTES: Final = 16
# A message has this long to come, as a request has.
ARRIVAL_SECONDS: Final = 60.0
# A client that was sent a close frame has this long to answer it and go.
CLOSE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one connection may take."""

    buffer_bytes: int
    ping_seconds: float
    pong_seconds: float


class Endpoint(Interface):
    """The application behind a WebSocket."""

    def received(self, text: bytes) -> None:
        """A whole message came; it is valid UTF-8."""

    def paused(self) -> None:
        """The client reads more slowly than it is written to: send as little as possible."""

    def resumed(self) -> None:
        """The client has caught up."""

    def closed(self) -> None:
        """Nothing is received and nothing can be sent any more. Called once."""


class WebSocket(Metered):
    """One connection: frames, pings, the closing handshake, and pauses when either side is slow."""

    def __init__(
        self,
        frames: Protocol,
        handshake: bytes,
        limits: Limits,
        make_endpoint: Callable[[WebSocket], Endpoint],
        on_lost: Callable[[WebSocket], None],
    ) -> None:
        """`handshake` is the answer that makes the connection a WebSocket, and `frames` what was agreed in it."""
        self._frames = frames
        self._handshake = handshake
        self._limits = limits
        self._on_lost = on_lost
        self._make_endpoint = make_endpoint
        self._endpoint: Endpoint
        self._transport: asyncio.Transport
        self._unread = bytearray()
        self._partial = bytearray()
        self._fragments = 0
        self._tail = 0
        self._unfinished_since: float | None = None
        self._slice_due = False
        self._write_paused = False
        self._read_paused = False
        self._busy = False
        self._heard = True
        self._pinged = False
        self._unsent = 0
        self._since = 0.0
        self._ended_at: float | None = None

    @property
    def is_open(self) -> bool:
        return self._ended_at is None

    @property
    def is_paused(self) -> bool:
        """Whether the client has not read what was sent before."""
        return self._write_paused

    def send(self, text: bytes) -> None:
        """Send a message, unless the connection has ended."""
        # Frames that were read together with a close are served after it.
        if self._ended_at is None and self._frames.state is State.OPEN:
            self._frames.send_text(text)
            self._flush()

    def close(self, code: int, reason: str) -> None:
        """Begin the closing handshake."""
        if self._ended_at is None and self._frames.state is State.OPEN:
            self._frames.send_close(code, reason)
            self._flush()
            self._notice_end()

    def abort(self) -> None:
        """End the connection without a close frame."""
        self._transport.abort()

    def set_busy(self, busy: bool) -> None:
        """While busy, nothing more is received."""
        self._busy = busy
        self._go_on()

    def keep_time(self, now: float) -> None:
        """Called every second or so: ping when idle, close after a ping timeout."""
        if self._ended_at is not None:
            if now - self._ended_at >= CLOSE_SECONDS:
                self.abort()
            return
        if self._unfinished_since is not None and now - self._unfinished_since >= ARRIVAL_SECONDS:
            self._fail(CloseCode.POLICY_VIOLATION, f"the message did not arrive within {ARRIVAL_SECONDS:g} seconds")
            return
        unsent = self._transport.get_write_buffer_size()
        if self._heard or unsent < self._unsent:
            # A client that reads is alive, even if it sends nothing.
            self._heard = self._pinged = False
            self._since = now
        elif self._pinged:
            if now - self._since >= self._limits.pong_seconds:
                self.abort()
        elif now - self._since >= self._limits.ping_seconds:
            self._pinged = True
            self._since = now
            self._frames.send_ping(b"")
            self._flush()
            unsent = self._transport.get_write_buffer_size()
        self._unsent = unsent

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.buffer_bytes)
        self._since = asyncio.get_running_loop().time()
        self._endpoint = self._make_endpoint(self)
        self._transport.write(self._handshake)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self._unread or self._is_blocked() or len(data) > SLICE_BYTES:
            self._unread += data
            self._go_on()
        else:
            self._take_in(data)

    def eof_received(self) -> None:
        if self._unread and self._ended_at is None:
            self._take_in(bytes(self._unread))
            self._unread.clear()
        self._frames.receive_eof()
        self._flush()
        self._notice_end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._notice_end()
        self._unread.clear()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._ended_at is None:
            self._endpoint.paused()
        self._go_on()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self.unsent is not None:
            self.unsent.set(self._transport.get_write_buffer_size())
        if self._ended_at is None:
            self._endpoint.resumed()
        self._go_on()

    def _is_blocked(self) -> bool:
        # What a client asks while it does not read the answers would pile up here.
        return self._ended_at is None and (self._write_paused or self._busy)

    def _go_on(self) -> None:
        """Read on, or stop reading, as the case may be."""
        blocked = self._is_blocked()
        if self._unread and not blocked and not self._slice_due:
            self._slice_due = True
            asyncio.get_running_loop().call_soon(self._take_slice)
        pause = blocked or bool(self._unread)
        if pause != self._read_paused and not self._transport.is_closing():
            self._read_paused = pause
            if pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _take_slice(self) -> None:
        self._slice_due = False
        if not self._is_blocked():
            piece = bytes(self._unread[:SLICE_BYTES])
            del self._unread[:SLICE_BYTES]
            self._take_in(piece)
            self._go_on()

    def _take_in(self, data: bytes) -> None:
        try:
            self._frames.receive_data(data)
        except EOFError:
            return  # the last of it came after the end
        events = self._frames.events_received()
        # Of a frame that has not all come nothing is known but its bytes.
        self._tail = 0 if events else self._tail + len(data)
        for event in events:
            if self._ended_at is None and isinstance(event, Frame):
                self._take_frame(event)
        if self._ended_at is not None:
            self._tail = 0  # What still comes is dropped.
        elif (held := self._tail + len(self._partial)) or self._unfinished_since is not None:
            self._meter_unfinished(held)
        self._flush()
        self._notice_end()

    def _meter_unfinished(self, held: int) -> None:
        if not held:
            self._unfinished_since = None
        elif self._unfinished_since is None:
            self._unfinished_since = asyncio.get_running_loop().time()
        if self.unfinished is not None and not self.unfinished.set(held):
            self._fail(CloseCode.TRY_AGAIN_LATER, "the server holds too many messages that have not all come")

    def _take_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.BINARY:
            self._fail(CloseCode.UNSUPPORTED_DATA, "only text frames are understood")
        elif frame.opcode is Opcode.TEXT and frame.fin:
            self._deliver(bytes(frame.data))
        elif frame.opcode in (Opcode.TEXT, Opcode.CONT):
            self._partial += frame.data
            self._fragments += 1
            if self._fragments > MOST_SMALL_FRAGMENTS and len(self._partial) < self._fragments * SMALL_FRAGMENT_BYTES:
                self._fail(CloseCode.POLICY_VIOLATION, "the fragments of the message are too small")
            elif frame.fin:
                self._fragments = 0
                whole, self._partial = bytes(self._partial), bytearray()
                self._deliver(whole)

    def _deliver(self, text: bytes) -> None:
        if not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError as error:
                self._fail(CloseCode.INVALID_DATA, f"not UTF-8 at byte {error.start}")
                return
        self._endpoint.received(text)

    def _fail(self, code: CloseCode, reason: str) -> None:
        self._frames.fail(code, reason)
        # What had come of the message is dropped at once, and leaves its room to others.
        self._partial.clear()
        self._tail = 0
        if self.unfinished is not None:
            self.unfinished.set(0)
        self._flush()
        self._notice_end()

    def _flush(self) -> None:
        transport = self._transport
        for data in self._frames.data_to_send():
            if transport.is_closing():
                return
            if data:
                transport.write(data)
            else:
                if not transport.can_write_eof():
                    transport.close()
                    continue
                # Closing at once, with input unread, would make the kernel reset the connection, and the client
                # might never see why.
                transport.write_eof()
        if self.unsent is not None:
            self.unsent.set(transport.get_write_buffer_size())

    def _notice_end(self) -> None:
        if self._ended_at is None and (self._frames.state is not State.OPEN or self._transport.is_closing()):
            self._ended_at = asyncio.get_running_loop().time()
            self._endpoint.closed()
            self._go_on()
