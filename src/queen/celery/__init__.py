"""Celery and Kombu on Queen: `Celery(broker="queen://localhost:6632", backend="queen://localhost:6632")`.

Kombu finds the transport through `CODEC`, the entry point `queen-json` of `kombu.serializers`: that group is the only
one that Kombu loads when it is imported, and it has none for transports. Celery finds the backend through the entry
point `queen` of `celery.result_backends`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from kombu.transport import TRANSPORT_ALIASES

TRANSPORT_ALIASES.setdefault("queen", "queen.celery.transport:Transport")
TRANSPORT_ALIASES.setdefault("queens", "queen.celery.transport:SecureTransport")


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


CODEC = (_encode, msgspec.json.decode, "application/x-queen-json", "utf-8")
"""A serializer `queen-json`: JSON as msgspec writes it, dates and UUIDs as text; faster than Kombu's `json`."""
