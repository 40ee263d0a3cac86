"""Several topics that are dequeued as one: which of them have something, and when others will."""

from __future__ import annotations

import heapq
import math

from queen.broker.topics.catalog import TopicKey


class Field:
    """What is known of the topics of a namespace, or of some of them. Times are those of the event loop."""

    def __init__(self, namespace: str, names: frozenset[str]) -> None:
        """Without names, all topics of the namespace."""
        self.namespace = namespace
        self.names = names
        self.scanned_at: float | None = None
        self.used_at = 0.0
        self._lively: set[TopicKey] = set()
        self._news: set[TopicKey] = set()
        self._due: list[tuple[float, TopicKey]] = []
        self._due_at: dict[TopicKey, float] = {}

    def covers(self, key: TopicKey) -> bool:
        """Whether a topic of its namespace is one of these."""
        return not self.names or key[1] in self.names

    def fed(self, key: TopicKey, at: float, now: float) -> None:
        """A topic has items that are due at a time."""
        if at <= now:
            self._lively.add(key)
            self._news.add(key)
        elif at < self._due_at.get(key, math.inf):
            # The first is enough: when it has come, PostgreSQL is asked for the next.
            self._due_at[key] = at
            heapq.heappush(self._due, (at, key))

    def look(self, now: float) -> set[TopicKey]:
        """The topics that may have something due; what is told from now on is news."""
        while self._due and self._due[0][0] <= now:
            at, key = heapq.heappop(self._due)
            self._lively.add(key)
            if self._due_at.get(key) == at:
                del self._due_at[key]
        self._news = set()
        return set(self._lively)

    def found_empty(self, keys: set[TopicKey]) -> None:
        """There was nothing due in these since the last look, save where there are news."""
        self._lively -= keys - self._news

    @property
    def next_at(self) -> float | None:
        return self._due[0][0] if self._due else None

    @property
    def has_news(self) -> bool:
        return bool(self._news)
