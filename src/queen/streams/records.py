"""Data types of streams: messages, records, windows, state rows; and times."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def now_ms() -> int:
    return int(time.time() * 1000)


def to_iso(ms: int) -> str:
    """`2026-04-26T10:59:28.267Z`."""
    moment = _EPOCH + timedelta(milliseconds=ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_iso_ms(text: str) -> int | None:
    """Milliseconds of an ISO 8601 time; UTC by default. None if invalid."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return datetime_ms(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def datetime_ms(moment: datetime) -> int:
    """Milliseconds of a datetime; a naive one is local time."""
    return (moment.astimezone(UTC) - _EPOCH) // _MILLISECOND


def any_ms(value: Any) -> int | None:
    """Milliseconds of the result of an `event_time` function: a datetime, milliseconds, or ISO 8601 text."""
    if isinstance(value, datetime):
        return datetime_ms(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value)
    return parse_iso_ms(value) if isinstance(value, str) else None


Message: TypeAlias = Mapping[str, Any]
"""A popped message: `data`, `partition`, `partitionId`, `createdAt`, `transactionId`, `leaseId`, …"""

Context: TypeAlias = dict[str, Any]
"""Second argument of functions after a reducer, and of `foreach`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The messages of one partition in one pop."""

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
    """A value before a window, a gate or a sink; `index` is that of its message in the batch."""

    message: Message
    index: int
    key: str
    value: Any

    @property
    def reduced(self) -> Any:
        """Input of a reducer: the value, or the message if that is null."""
        return self.message if self.value is None else self.value


@dataclass(frozen=True, slots=True)
class Emit:
    """An output value of a window, a gate, or a stateless stream."""

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


_ATTRIBUTES = ("_queue_name", "queue_name", "name")
_KEYS = ("queueName", "queue_name", "name")


def queue_name_of(queue: Any) -> str:
    """The name of `"orders"`, of a client's `queen.queue("orders")`, or of `{"queueName": "orders"}`."""
    if isinstance(queue, str):
        candidates: list[Any] = [queue]
    elif isinstance(queue, Mapping):
        candidates = [queue.get(key) for key in _KEYS]
    else:
        candidates = [getattr(queue, attribute, None) for attribute in _ATTRIBUTES]
    for candidate in candidates:
        if isinstance(candidate, str) and candidate:
            return candidate
    raise ValueError(
        f"{queue!r} is not a queue: pass its name, queen.queue('name') of a client, or {{'queueName': 'name'}}"
    )


WATERMARK_KEY = "__wm__"


@dataclass(frozen=True, slots=True)
class Row:
    """A state value and its version, for optimistic locking."""

    value: Any
    version: int | None = None

    def number(self, name: str) -> int | None:
        """A numeric field of the value, or None."""
        found = self.value.get(name) if isinstance(self.value, Mapping) else None
        return int(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


Rows: TypeAlias = dict[str, Row]


@dataclass(slots=True)
class Outcome:
    """Result of a cycle: state changes and emitted values."""

    changes: list[dict[str, Any]] = field(default_factory=list)
    emits: list[Emit] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """End times of the windows that stay open."""
    late: int = 0

    def upsert(self, key: str, value: Any, version: int | None) -> None:
        self.changes.append({"type": "upsert", "key": key, "value": value, "if_version": version})

    def delete(self, key: str, version: int | None) -> None:
        self.changes.append({"type": "delete", "key": key, "if_version": version})


def watermark_of(rows: Rows) -> int | None:
    """The stored watermark, or None."""
    row = rows.get(WATERMARK_KEY)
    return row.number("eventTimeMs") if row is not None else None
