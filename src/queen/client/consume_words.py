"""The words that say how much is taken, and for how long; the same for queues and topics."""

from __future__ import annotations

from typing import Self


class ConsumeWords:
    """What has been said about taking messages of queues, or items of topics."""

    # Defaults live on the class: a builder is made for every push, and sets only what is said.
    _concurrency = 1
    _batch = 1
    _limit: int | None = None
    _idle_millis: int | None = None
    _wait = True
    _timeout_millis = 30_000
    _each = False

    def concurrency(self, count: int) -> Self:
        """How many workers fetch and handle at the same time."""
        self._concurrency = max(1, count)
        return self

    def batch(self, size: int) -> Self:
        """How many to take at a time; above 1, the handler gets a list."""
        self._batch = max(1, size)
        return self

    def limit(self, count: int | None) -> Self:
        """End after so many (of each worker)."""
        self._limit = count
        return self

    def idle_millis(self, millis: int | None) -> Self:
        """End when nothing has come for so long."""
        self._idle_millis = millis
        return self

    def timeout_millis(self, millis: int) -> Self:
        """How long one fetch waits for something."""
        self._timeout_millis = millis
        return self

    def wait(self, enabled: bool = True) -> Self:
        """Whether a fetch waits for something."""
        self._wait = enabled
        return self

    def each(self) -> Self:
        """Hand over one by one, however many are taken at a time."""
        self._each = True
        return self
