"""Messages to a client over its WebSocket, as in docs/websocket.md."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec

from queen.http.consume.requests import RequestId
from queen.wire.times import iso_millis

_encode: Final = msgspec.json.encode


def batch_head(id: str) -> bytes:
    """What all batches of a subscription begin with."""
    return b'{"type":"batch","id":%b,' % _encode(id)


def batch(head: bytes, body: bytes, lease_seconds: int | None) -> bytes:
    """The answer of a pop as it is, with a few fields more; there is no lease where the messages are consumed."""
    lease = b"" if lease_seconds is None else b'"leaseSeconds":%d,' % lease_seconds
    return b"".join((head, lease, memoryview(body)[1:]))


def subscribed(id: str, **options: Any) -> bytes:
    return _encode({"type": "subscribed", "id": id, **options})


def unsubscribed(id: str) -> bytes:
    return _encode({"type": "unsubscribed", "id": id})


def acked(id: RequestId, results: bytes) -> bytes:
    """`results` is the answer of an HTTP ack as it is."""
    return b'{"type":"acked","id":%b,"results":%b}' % (_encode(id), results)


def renewed(id: RequestId, lease_id: str, expires_at: datetime) -> bytes:
    return _encode({"type": "renewed", "id": id, "leaseId": lease_id, "expiresAt": iso_millis(expires_at)})


def lost(id: str, lease_id: str) -> bytes:
    return _encode({"type": "lost", "id": id, "leaseId": lease_id})


def pong(id: RequestId) -> bytes:
    return _encode({"type": "pong", "id": id})


def closing(reason: str, seconds: float) -> bytes:
    return _encode({"type": "closing", "reason": reason, "seconds": seconds})


def error(id: RequestId, request: str | None, status: int, text: str) -> bytes:
    return _encode({"type": "error", "id": id, "request": request, "status": status, "error": text})
