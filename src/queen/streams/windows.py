"""Windows: assigns values to time spans, and tracks open windows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from queen.streams.operators import Operator, UserFunction, call
from queen.streams.records import Message, Span, any_ms, parse_iso_ms, to_iso

SEPARATOR = "\x1f"

_EVERY_MS = {"second": 1000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000, "week": 7 * 86_400_000}
_FIRST_MONDAY_MS = 4 * 86_400_000
_SNAKE = {
    "gracePeriod": "grace_period",
    "idleFlushMs": "idle_flush_ms",
    "eventTime": "event_time",
    "allowedLateness": "allowed_lateness",
    "onLate": "on_late",
}


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Options of all windows, in seconds except `idle_flush_ms`.

    A window is emitted `grace_period` after its end; while no messages arrive, by a timer every `idle_flush_ms` (0:
    never). With `event_time`, a function of the message, the watermark is the maximum event time minus
    `allowed_lateness`; older messages are dropped or, with `on_late="include"`, added to their window.
    """

    grace_period: float = 0
    idle_flush_ms: int | None = None
    event_time: UserFunction | None = None
    allowed_lateness: float = 0
    on_late: str | None = None

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> WindowOptions:
        """Options in snake_case or camelCase. Raises for unknown names and invalid values."""
        named = {_SNAKE.get(name, name): value for name, value in options.items()}
        unknown = sorted(set(named) - set(cls.__dataclass_fields__))
        if unknown:
            raise TypeError(f"unknown window options: {', '.join(unknown)}")
        if named.get("on_late") not in (None, "drop", "include"):
            raise ValueError(f"on_late must be 'drop' or 'include', not {named['on_late']!r}")
        return cls(**named)


class Window(Operator):
    """Base class of windows."""

    kind = "window"
    name: ClassVar[str]
    default_flush_ms: ClassVar[int]

    def __init__(self, tag: str, shape: dict[str, Any], options: Mapping[str, Any]) -> None:
        read = WindowOptions.read(options)
        flush = self.default_flush_ms if read.idle_flush_ms is None else read.idle_flush_ms
        self.tag = tag
        self.grace_ms = max(0, int(read.grace_period * 1000))
        self.idle_flush_ms = max(0, int(flush))
        self.lateness_ms = max(0, int(read.allowed_lateness * 1000))
        self.drops_late = read.on_late != "include"
        self._event_time = read.event_time if callable(read.event_time) else None
        self._config = {
            "kind": f"window-{self.name}",
            **shape,
            "gracePeriod": read.grace_period,
            "idleFlushMs": self.idle_flush_ms,
            "eventTime": self._event_time is not None,
            "allowedLateness": read.allowed_lateness,
            "onLate": "drop" if self.drops_late else "include",
        }

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def by_event_time(self) -> bool:
        return self._event_time is not None

    @property
    def prefix(self) -> str:
        """Prefix of the state keys of this window."""
        return self.tag + SEPARATOR

    async def time_of(self, message: Message) -> int:
        """The time of a message in milliseconds. Raises `ValueError` if it has no valid one."""
        if self._event_time is None:
            created = message.get("createdAt")
            found = parse_iso_ms(created) if isinstance(created, str) else None
        else:
            try:
                found = any_ms(await call(self._event_time, message))
            except Exception as error:
                raise ValueError(f"event_time function failed: {error!r}") from error
        if found is None:
            raise ValueError(f"message {message.get('transactionId')!r} has no valid time, skipped")
        return found


class SpanWindow(Window):
    """A window whose spans depend only on the time."""

    def spans(self, ms: int) -> list[Span]:
        """The windows that contain a time."""
        raise NotImplementedError

    def state_key(self, span: Span, key: str) -> str:
        return SEPARATOR.join((self.tag, span.key, key))


class Tumbling(SpanWindow):
    """Consecutive windows of equal length."""

    name = "tumbling"
    default_flush_ms = 5000

    def __init__(self, seconds: float, **options: Any) -> None:
        self._ms = _millis(seconds, "window_tumbling", "seconds")
        super().__init__(f"tumb:{seconds}", {"seconds": seconds}, options)

    def spans(self, ms: int) -> list[Span]:
        return [_span(ms // self._ms * self._ms, self._ms)]


class Sliding(SpanWindow):
    """Overlapping windows of `size` seconds, one starting every `slide` seconds."""

    name = "sliding"
    default_flush_ms = 5000

    def __init__(self, size: float, slide: float, **options: Any) -> None:
        self._size_ms = _millis(size, "window_sliding", "size")
        self._slide_ms = _millis(slide, "window_sliding", "slide")
        if size % slide != 0:
            raise ValueError(f"window_sliding: size ({size}) must be a multiple of slide ({slide})")
        super().__init__(f"slide:{size}:{slide}", {"size": size, "slide": slide}, options)

    def spans(self, ms: int) -> list[Span]:
        latest = ms // self._slide_ms * self._slide_ms
        return [_span(start, self._size_ms) for start in range(latest, ms - self._size_ms, -self._slide_ms)]


class Cron(SpanWindow):
    """Windows aligned to the clock: second, minute, hour, day or week (from Monday), in UTC."""

    name = "cron"
    default_flush_ms = 30_000

    def __init__(self, every: str, **options: Any) -> None:
        if every not in _EVERY_MS:
            raise ValueError(f"window_cron: every must be one of {', '.join(_EVERY_MS)}, not {every!r}")
        self._ms = _EVERY_MS[every]
        self._first_ms = _FIRST_MONDAY_MS if every == "week" else 0
        super().__init__(f"cron:{every}", {"every": every}, options)

    def spans(self, ms: int) -> list[Span]:
        return [_span((ms - self._first_ms) // self._ms * self._ms + self._first_ms, self._ms)]


class Session(Window):
    """A window per key that ends after `gap` seconds without values."""

    name = "session"
    default_flush_ms = 1000

    def __init__(self, gap: float, **options: Any) -> None:
        self.gap_ms = _millis(gap, "window_session", "gap")
        super().__init__(f"sess:{gap}", {"gap": gap}, options)

    @property
    def prefix(self) -> str:
        return f"{self.tag}{SEPARATOR}open{SEPARATOR}"

    def state_key(self, key: str) -> str:
        return self.prefix + key

    def span(self, start: int, last: int) -> Span:
        """The window of a session from its first to its last value."""
        return Span(start, last + self.gap_ms, to_iso(start))


def _span(start: int, length: int) -> Span:
    return Span(start, start + length, to_iso(start))


def _millis(seconds: float, what: str, option: str) -> int:
    if not isinstance(seconds, int | float) or seconds <= 0:
        raise ValueError(f"{what} requires {option}, a number of seconds above 0, not {seconds!r}")
    ms = int(seconds * 1000)
    if ms < 1:
        raise ValueError(f"{what}: {option} must be at least a millisecond, not {seconds!r} seconds")
    return ms


@dataclass(slots=True)
class OpenPartition:
    """A partition with open windows; `ends` are their end times, `unread` means state not read by this runner yet."""

    id: str
    name: str
    ends: set[int] = field(default_factory=set)
    unread: bool = False
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    def ripe(self, at: int) -> bool:
        return self.unread or any(end <= at for end in self.ends)


class OpenWindows:
    """The partitions with open windows."""

    def __init__(self) -> None:
        self._partitions: dict[str, OpenPartition] = {}

    def partition(self, id: str, name: str) -> OpenPartition:
        found = self._partitions.get(id)
        if found is None:
            found = self._partitions[id] = OpenPartition(id, name)
        return found

    def ripe(self, at: int) -> list[OpenPartition]:
        return [partition for partition in self._partitions.values() if partition.ripe(at)]

    def note(self, partition: OpenPartition, closed_to: int | None, still_open: Iterable[int]) -> None:
        """Record that windows up to `closed_to` were emitted and which stay open."""
        # It may have been discarded while a task waited for its lock.
        known = self.partition(partition.id, partition.name)
        if closed_to is not None:
            known.ends = {end for end in known.ends if end > closed_to}
        known.ends.update(still_open)

    def discard_closed(self) -> None:
        """Discard partitions without open windows and without a running cycle."""
        for id, partition in list(self._partitions.items()):
            if not partition.ends and not partition.unread and not partition.busy.locked():
                del self._partitions[id]
