"""A connection over TLS that knows how much of what was written its client has not read.

The transports of event loops encrypt all that is written at once, and hand it to the socket's transport, where it is
out of sight: they say that nothing is unsent, and ask for no pause. So what is written waits here, and goes to them in
slices, as long as they do not ask for a pause.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, Final, cast

_SLICE_BYTES: Final = 64 * 1024
# What the socket's transport holds when it pauses writing: its limit, and the slice beyond it.
_OUT_OF_SIGHT_BYTES: Final = 2 * _SLICE_BYTES


class PacedConnection(asyncio.Transport, asyncio.BufferedProtocol):
    """The protocol of the TLS transport, and the transport of `protocol`.

    What was decrypted comes in a buffer that all connections share: for a protocol without one, every record is read
    into 256 KB of its own, and the page faults of these cost more than the cryptography.
    """

    def __init__(self, protocol: asyncio.BaseProtocol, decrypted: memoryview) -> None:
        super().__init__()
        self._protocol = cast(asyncio.Protocol, protocol)
        self._decrypted = decrypted
        self._tls: asyncio.Transport
        self._queue: deque[memoryview] = deque()
        self._queued = 0
        self._held = False
        """Whether the TLS transport takes no more just now."""
        self._paused = False
        """Whether the protocol was asked to pause."""
        self._closing = False
        self._high, self._low = _SLICE_BYTES, _SLICE_BYTES // 4

    # What the TLS transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._tls = cast(asyncio.Transport, transport)
        self._tls.set_write_buffer_limits(high=_SLICE_BYTES)
        self._protocol.connection_made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._decrypted

    def buffer_updated(self, nbytes: int) -> None:
        if not self._closing:
            self._protocol.data_received(bytes(self._decrypted[:nbytes]))

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop()
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._held = True

    def resume_writing(self) -> None:
        self._held = False
        self._flush()
        if self._closing and not self._queue:
            self._tls.close()
        elif self._paused and self.get_write_buffer_size() <= self._low:
            self._paused = False
            self._protocol.resume_writing()

    # What the protocol calls.

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not self._queue and not self._held and len(data) <= _SLICE_BYTES:
            self._tls.write(data)
        elif not self.is_closing():
            self._queue.append(memoryview(data))
            self._queued += len(data)
            self._flush()
        if not self._paused and self.get_write_buffer_size() > self._high:
            self._paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        for data in list_of_data:
            self.write(data)

    def get_write_buffer_size(self) -> int:
        out_of_sight = _OUT_OF_SIGHT_BYTES if self._held else 0
        return self._queued + self._tls.get_write_buffer_size() + out_of_sight

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high if high is not None else _SLICE_BYTES
        self._low = low if low is not None else self._high // 4
        # Only a transport that has asked for a pause says when it is over.
        self._tls.set_write_buffer_limits(high=min(self._high, _SLICE_BYTES))

    def close(self) -> None:
        self._closing = True
        if not self._queue:
            self._tls.close()

    def abort(self) -> None:
        self._drop()
        self._tls.abort()

    def is_closing(self) -> bool:
        return self._closing or self._tls.is_closing()

    def can_write_eof(self) -> bool:
        # TLS has no end of sending without an end of receiving.
        return False

    def pause_reading(self) -> None:
        self._tls.pause_reading()

    def resume_reading(self) -> None:
        self._tls.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def _flush(self) -> None:
        queue = self._queue
        while queue and not self._held:
            piece = queue.popleft()
            if len(piece) > _SLICE_BYTES:
                queue.appendleft(piece[_SLICE_BYTES:])
                piece = piece[:_SLICE_BYTES]
            self._queued -= len(piece)
            self._tls.write(piece)

    def _drop(self) -> None:
        self._queue.clear()
        self._queued = 0
