"""Which of several servers a request goes to, and which is next when that one fails."""

from __future__ import annotations

import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache

from queen.client.config import Strategy

_FNV_OFFSET = 2_166_136_261
_FNV_PRIME = 16_777_619
_KEYS_REMEMBERED = 4096


class Balancer:
    """Orders the servers for each request: the chosen one first, those that failed a moment ago last."""

    def __init__(
        self,
        urls: Sequence[str],
        strategy: Strategy,
        virtual_nodes: int,
        rest_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A server that failed rests for `rest_seconds`, unless all do."""
        self._urls = tuple(dict.fromkeys(urls))
        self._strategy = strategy
        self._rest_seconds = rest_seconds
        self._clock = clock
        self._resting_until: dict[str, float] = {}
        self._turn = 0
        # Requests that belong to no consumer stay with one server, another one for each client.
        self._own_key = uuid.uuid4().hex
        ring = sorted((fnv1a(f"{url}#vnode{number}"), url) for url in self._urls for number in range(virtual_nodes))
        self._hashes = [position for position, _ in ring]
        self._ring = [url for _, url in ring]
        self._around = lru_cache(_KEYS_REMEMBERED)(self._walk)

    def order(self, key: str | None = None) -> tuple[str, ...]:
        """Every server once, in the order they are to be tried for a request with this key."""
        if len(self._urls) == 1:
            return self._urls
        order = self._by_strategy(key or self._own_key)
        if not self._resting_until:
            return order
        now = self._clock()
        return tuple(sorted(order, key=lambda url: self._resting_until.get(url, 0.0) > now))

    def failed(self, url: str) -> None:
        """The server did not answer, or not as it should: others come first for a while."""
        self._resting_until[url] = self._clock() + self._rest_seconds

    def served(self, url: str) -> None:
        """The server works."""
        if self._resting_until:
            self._resting_until.pop(url, None)

    def resting(self) -> tuple[str, ...]:
        """The servers that failed a moment ago."""
        now = self._clock()
        return tuple(url for url, until in self._resting_until.items() if until > now)

    def _by_strategy(self, key: str) -> tuple[str, ...]:
        if self._strategy is Strategy.AFFINITY:
            return self._around(key)
        if self._strategy is Strategy.SESSION:
            return self._from(fnv1a(key))
        self._turn += 1
        return self._from(self._turn - 1)

    def _from(self, start: int) -> tuple[str, ...]:
        start %= len(self._urls)
        return self._urls[start:] + self._urls[:start]

    def _walk(self, key: str) -> tuple[str, ...]:
        start = bisect_left(self._hashes, fnv1a(key))
        return tuple(dict.fromkeys(self._ring[start:] + self._ring[:start]))


def fnv1a(text: str) -> int:
    """The 32-bit FNV-1a hash over the characters: all clients of a queue must agree on it."""
    value = _FNV_OFFSET
    for character in text:
        value = (value ^ ord(character)) * _FNV_PRIME & 0xFFFFFFFF
    return value
