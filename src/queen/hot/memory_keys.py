"""Idempotency keys in memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

_SWEEP_AT_LEAST: Final = 1000


class MemoryKeys:
    """Keys with their ids and when they are forgotten."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[int, float]] = {}
        self._sweep_at = _SWEEP_AT_LEAST

    async def reserve(self, namespace: str, ids: Mapping[str, int], seconds: float) -> dict[str, int]:
        now = time.monotonic()
        owners = {}
        for key, id in ids.items():
            known = self._known.get((namespace, key))
            if known is None or known[1] <= now:
                known = self._known[namespace, key] = (id, now + seconds)
            owners[key] = known[0]
        self._sweep(now)
        return owners

    async def lookup(self, namespace: str, keys: Sequence[str]) -> dict[str, int]:
        now = time.monotonic()
        found = {key: self._known.get((namespace, key)) for key in keys}
        return {key: known[0] for key, known in found.items() if known is not None and known[1] > now}

    async def forget(self, namespace: str, keys: Sequence[str]) -> None:
        for key in keys:
            self._known.pop((namespace, key), None)

    def _sweep(self, now: float) -> None:
        """Let old keys go whenever their number has doubled."""
        if len(self._known) > self._sweep_at:
            self._known = {key: known for key, known in self._known.items() if known[1] > now}
            self._sweep_at = max(_SWEEP_AT_LEAST, 2 * len(self._known))
