"""What flows through a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""A message as it was popped: `data`, `partition`, `partitionId`, `createdAt`, `transactionId`, `leaseId`, …"""

Context: TypeAlias = dict[str, Any]
"""What functions after a reducer, and effects, are told beside the value."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The messages of one partition that were popped together."""

    partition_id: str
    partition: str
    lease_id: str
    group: str
    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Span:
    """A window: from `start` to just before `end`."""

    start: int
    end: int
    key: str


@dataclass(frozen=True, slots=True)
class Record:
    """A value on its way to a window, a gate or a sink; `index` is the place of its message in the batch."""

    message: Message
    index: int
    key: str
    value: Any

    @property
    def reduced(self) -> Any:
        """What a reducer is given: the value, or the whole message where that is null."""
        return self.message if self.value is None else self.value


@dataclass(frozen=True, slots=True)
class Emit:
    """A value that leaves a window, a gate, or a stream without either."""

    key: str
    value: Any
    span: Span | None = None

    def context(self, partition: str, partition_id: str) -> Context:
        return {
            "partition": partition,
            "partitionId": partition_id,
            "key": self.key,
            "windowKey": self.span.key if self.span else None,
            "windowStart": self.span.start if self.span else None,
            "windowEnd": self.span.end if self.span else None,
        }
