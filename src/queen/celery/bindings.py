"""Bindings of queues to exchanges, as all processes see them: a publisher need not have declared the queues."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from queen.celery.link import Link

_KV = "/api/v1/kv"
_CACHED_SECONDS = 5.0


class Binding(msgspec.Struct, frozen=True):
    """A queue that gets what is published to an exchange with keys that match."""

    exchange: str
    kind: str
    routing_key: str
    queue: str

    @property
    def key(self) -> str:
        """A hash: names may be longer than a key, and hold anything."""
        digest = hashlib.sha256(msgspec.json.encode([self.kind, self.routing_key, self.queue])).hexdigest()
        return f"{_prefix(self.exchange)}{digest}"


class _Row(msgspec.Struct):
    key: str
    value: Binding


class _Page(msgspec.Struct):
    rows: list[_Row] = []
    truncated: bool = False


class _Pages(msgspec.Struct):
    results: list[_Page]


_pages = msgspec.json.Decoder(_Pages)


class SharedBindings:
    """The bindings of a namespace, kept as keys. What others add is seen within seconds."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._known: dict[str, tuple[float, list[Binding]]] = {}

    def add(self, binding: Binding) -> None:
        self._run({"op": "put", "key": binding.key, "value": binding, "forever": True})
        self._known.pop(binding.exchange, None)

    def remove(self, bindings: Iterable[Binding]) -> None:
        for binding in bindings:
            self._run({"op": "delete", "key": binding.key})
            self._known.pop(binding.exchange, None)

    def of_exchange(self, exchange: str) -> list[Binding]:
        """The bindings of an exchange, at most some seconds old."""
        read_at, bindings = self._known.get(exchange, (0.0, []))
        now = time.monotonic()
        if now - read_at > _CACHED_SECONDS or not read_at:
            bindings = self._read(exchange)
            self._known[exchange] = (now, bindings)
        return bindings

    def _read(self, exchange: str) -> list[Binding]:
        bindings: list[Binding] = []
        asked: dict[str, Any] = {"op": "getPrefix", "prefix": _prefix(exchange)}
        while True:
            page = _pages.decode(self._run(asked)).results[0]
            bindings += [row.value for row in page.rows]
            if not page.truncated or not page.rows:
                return bindings
            asked["after"] = page.rows[-1].key

    def _run(self, operation: dict[str, Any]) -> bytes:
        return self._link.post(_KV, {"operations": [{**operation, "ns": self._link.address.namespace}]})


def _prefix(exchange: str) -> str:
    return f"kombu.binding.{hashlib.sha256(exchange.encode()).hexdigest()[:32]}."
