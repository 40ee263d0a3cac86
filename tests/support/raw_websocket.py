"""WebSocket without a client in between: any frame goes out, and what comes back is taken apart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tests.support.consumer import PATH

TEXT, BINARY, CONTINUATION, CLOSE, PING, PONG = 0x1, 0x2, 0x0, 0x8, 0x9, 0xA


class RawSocket:
    """One connection after its handshake."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def write(self, raw: bytes) -> None:
        self.writer.write(raw)

    def send(self, payload: bytes, opcode: int = TEXT, *, last: bool = True) -> None:
        self.write(frame(payload, opcode, last=last))

    async def next(self) -> tuple[int, bytes]:
        """Opcode and payload of the next frame; a connection that ends without one raises `EOFError`."""
        async with asyncio.timeout(100):
            first, length = await self._reader.readexactly(2)
            if length > 125:
                length = int.from_bytes(await self._reader.readexactly(2 if length == 126 else 8), "big")
            return first & 0xF, await self._reader.readexactly(length)

    async def next_json(self) -> dict[str, Any]:
        opcode, payload = await self.next()
        assert opcode == TEXT, (opcode, payload)
        decoded: dict[str, Any] = msgspec.json.decode(payload)
        return decoded

    async def closed(self) -> tuple[int, str]:
        """Code and reason of the close frame that comes, whatever comes before; then the connection has to end."""
        while True:
            opcode, payload = await self.next()
            if opcode == CLOSE:
                break
        async with asyncio.timeout(100):
            assert await self._reader.read() == b""
        return int.from_bytes(payload[:2], "big"), payload[2:].decode()


def frame(payload: bytes, opcode: int = TEXT, *, last: bool = True, masked: bool = True) -> bytes:
    """A frame as a client sends it."""
    head = bytes([opcode | (0x80 if last else 0)])
    flag = 0x80 if masked else 0
    if len(payload) < 126:
        head += bytes([flag | len(payload)])
    elif len(payload) < 1 << 16:
        head += bytes([flag | 126]) + len(payload).to_bytes(2, "big")
    else:
        head += bytes([flag | 127]) + len(payload).to_bytes(8, "big")
    if not masked:
        return head + payload
    mask = os.urandom(4)
    repeated = (mask * (len(payload) // 4 + 1))[: len(payload)]
    hidden = int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")
    return head + mask + hidden.to_bytes(len(payload), "big")


def handshake(url: str, target: str = PATH, **headers: str) -> bytes:
    """The request that asks for a WebSocket; `headers` change or add some, an empty one leaves it out."""
    fields = {
        "Host": urlsplit(url).netloc,
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    } | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return f"GET {target} HTTP/1.1\r\n{lines}\r\n".encode()


@asynccontextmanager
async def raw_socket(url: str, *, first: bytes = b"", receive_buffer: int | None = None) -> AsyncIterator[RawSocket]:
    """A connection; `first` is sent right behind the handshake."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=receive_buffer or 1 << 16)
    try:
        writer.write(handshake(url) + first)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 "), head
        yield RawSocket(reader, writer)
    finally:
        writer.transport.abort()


async def shake_hands(url: str, target: str = PATH, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Ask for a WebSocket; returns status, headers and body of the answer."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        writer.write(handshake(url, target, **headers))
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.strip().split("\r\n")
        fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        return int(status.split()[1]), fields, body
    finally:
        writer.transport.abort()
