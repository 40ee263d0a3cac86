"""A cache in two generations."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Generations(Generic[K, V]):
    """Remembers up to twice `most` entries without any bookkeeping per hit: a full generation becomes the older one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._recent: dict[K, V] = {}
        self._older: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        found = self._recent.get(key)
        if found is None:
            found = self._older.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        if len(self._recent) >= self._most:
            self._older = self._recent
            self._recent = {}
        self._recent[key] = value

    def clear(self) -> None:
        self._recent.clear()
        self._older.clear()
