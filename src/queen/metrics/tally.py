"""What is counted: for each queue, and for a worker as a whole."""

from __future__ import annotations

from typing import Final, Self

import msgspec


class Tally(msgspec.Struct, array_like=True, gc=False):
    """Numbers that only grow, but for `lag_max_ms`, which is the largest since the last flush."""

    push_requests: int = 0
    push_messages: int = 0
    """Messages stored, whether by a push, a transaction or a redrive."""
    pop_requests: int = 0
    pop_messages: int = 0
    pop_empty: int = 0
    auto_acked: int = 0
    """Of the popped messages, those that were consumed by the pop itself."""
    ack_requests: int = 0
    ack_success: int = 0
    """Acknowledgments that completed a message."""
    ack_failed: int = 0
    """Acknowledgments that reported a failure, or were refused."""
    transactions: int = 0
    dead_letters: int = 0
    partitions_created: int = 0
    partitions_deleted: int = 0
    lag_ms: float = 0.0
    """Time from push to pop, summed up over the popped messages."""
    lag_max_ms: float = 0.0

    def lagged(self, messages: int, lag_ms: float) -> None:
        """So many messages were popped, each that long after it was pushed."""
        self.lag_ms += messages * lag_ms
        if lag_ms > self.lag_max_ms:
            self.lag_max_ms = lag_ms

    def since(self, base: Self) -> Self:
        """What was counted after `base` was copied from this tally."""
        grown = {name: getattr(self, name) - getattr(base, name) for name in self.__struct_fields__}
        return type(self)(**grown | {"lag_max_ms": self.lag_max_ms})

    def add(self, other: Tally) -> None:
        """Take in what another tally has counted."""
        for name in other.__struct_fields__:
            if name == "lag_max_ms":
                self.lag_max_ms = max(self.lag_max_ms, other.lag_max_ms)
            else:
                setattr(self, name, getattr(self, name) + getattr(other, name))

    def copy(self) -> Self:
        return type(self)(*(getattr(self, name) for name in self.__struct_fields__))

    def row(self) -> dict[str, int | float]:
        """The numbers by name."""
        return {name: getattr(self, name) for name in self.__struct_fields__}

    @property
    def processed(self) -> int:
        """Messages that are done with: completed, consumed by their pop, or given up on."""
        return self.ack_success + self.auto_acked + self.dead_letters


class WorkerTally(Tally, array_like=True, gc=False):
    """What is counted for a worker as a whole, on top of what is counted for each queue."""

    db_errors: int = 0
    """Statements that failed because PostgreSQL was away or too busy."""
    batches: int = 0
    """Fused database calls."""
    http_responses: int = 0


QUEUE_COLUMNS: Final = Tally.__struct_fields__
WORKER_COLUMNS: Final = WorkerTally.__struct_fields__
