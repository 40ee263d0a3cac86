"""Idempotency keys in memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence


class MemoryKeys:
    """The keys that were learnt last, with when they are forgotten."""

    def __init__(self, most: int = 100_000) -> None:
        self._most = most
        self._until: OrderedDict[tuple[str, str], float] = OrderedDict()

    async def known(self, namespace: str, keys: Sequence[str]) -> set[str]:
        now = time.monotonic()
        return {key for key in keys if self._until.get((namespace, key), 0.0) > now}

    async def learn(self, namespace: str, keys: Sequence[str], seconds: float) -> None:
        until = time.monotonic() + seconds
        for key in keys:
            self._until[namespace, key] = until
            self._until.move_to_end((namespace, key))
        while len(self._until) > self._most:
            self._until.popitem(last=False)
