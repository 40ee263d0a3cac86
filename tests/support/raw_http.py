"""HTTP without a client in between: what goes out and what comes back, byte for byte."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import msgspec


async def exchange(url: str, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send one request on a connection of its own; returns the status and the body as it came."""
    reader, writer = await open_request(url, method, target, body)
    try:
        status = int((await reader.readline()).split()[1])
        length = None
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return status, await reader.readexactly(length) if length is not None else b""
    finally:
        writer.close()


async def open_request(
    url: str, method: str, target: str, body: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send one request and leave the connection open, the answer unread."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
    head = f"{method} {target} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


def push_body(queue: str, payload: bytes, transaction_id: str = "", partition: str = "Default") -> bytes:
    """The body of a push of one payload, which may be any bytes."""
    return b'{"items":[{"queue":%b,"partition":%b,"transactionId":%b,"payload":%b}]}' % (
        msgspec.json.encode(queue),
        msgspec.json.encode(partition),
        msgspec.json.encode(transaction_id),
        payload,
    )


def raw_payloads(popped: bytes) -> list[bytes]:
    """The payloads in the answer of a pop, not decoded."""
    messages = msgspec.json.decode(popped, type=dict[str, msgspec.Raw]).get("messages", msgspec.Raw(b"[]"))
    return [bytes(one["data"]) for one in msgspec.json.decode(messages, type=list[dict[str, msgspec.Raw]])]
