"""The enqueue buffer in memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from queen.hot.interfaces import Buffered


@dataclass(slots=True)
class _Shard:
    items: dict[int, Buffered] = field(default_factory=dict)
    keys: dict[tuple[str, str], int] = field(default_factory=dict)
    taken: dict[int, float] = field(default_factory=dict)


class MemoryBuffer:
    """Items in the order in which they were appended, by shard."""

    def __init__(self) -> None:
        self._shards: dict[int, _Shard] = {}

    async def append(self, shard: int, items: Sequence[Buffered]) -> int:
        kept = self._shards.setdefault(shard, _Shard())
        for item in items:
            kept.items.setdefault(item.id, item)
            if item.idempotency_key is not None:
                kept.keys.setdefault((item.namespace, item.idempotency_key), item.id)
        return len(kept.items)

    async def take(self, shard: int, limit: int, seconds: float) -> list[Buffered]:
        kept = self._shards.setdefault(shard, _Shard())
        now = time.monotonic()
        found: list[Buffered] = []
        for id, item in kept.items.items():
            if len(found) == limit:
                break
            if kept.taken.get(id, 0.0) <= now:
                kept.taken[id] = now + seconds
                found.append(item)
        return found

    async def confirm(self, shard: int, ids: Sequence[int]) -> None:
        kept = self._shards.setdefault(shard, _Shard())
        for id in ids:
            item = kept.items.pop(id, None)
            kept.taken.pop(id, None)
            if item is not None and item.idempotency_key is not None:
                key = (item.namespace, item.idempotency_key)
                if kept.keys.get(key) == id:
                    del kept.keys[key]

    async def length(self, shard: int) -> int:
        kept = self._shards.get(shard)
        return len(kept.items) if kept is not None else 0

    async def find_key(self, shard: int, namespace: str, key: str) -> int | None:
        kept = self._shards.get(shard)
        return kept.keys.get((namespace, key)) if kept is not None else None
