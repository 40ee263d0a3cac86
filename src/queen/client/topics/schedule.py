"""`topic(...).schedule(...)`: an item for every tick of a cron expression, deduplicated across clients."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from queen.client.config import ClientLog
from queen.client.errors import TRANSIENT
from queen.client.topics.calls import TopicCalls
from queen.client.types import Deferred

MAX_CATCH_UP_SECONDS: Final = 3000.0
"""The server keeps the idempotency key of a tick for at least an hour; older ticks could be enqueued twice."""

# Ticks are enqueued ahead, so that a client restart misses none.
_LEAD_TIME: Final = timedelta(seconds=60)
# The clock may be set during a sleep.
_MAX_SLEEP_SECONDS: Final = 30.0


def check_schedule(cron: str, timezone: str, catch_up: float) -> None:
    """Raises `ValueError` for what is no schedule, or one that never ticks."""
    if not 0 <= catch_up <= MAX_CATCH_UP_SECONDS:
        raise ValueError(f"catch_up must be from 0 to {MAX_CATCH_UP_SECONDS:.0f} seconds, not {catch_up}")
    _next_ticks(cron, datetime.now(_zone(timezone)), 1)


class Schedule(Deferred[None]):
    """A schedule; runs when awaited, until the signal is set or the task is cancelled."""

    def __init__(
        self,
        calls: TopicCalls,
        log: ClientLog,
        cron: str,
        item: dict[str, Any],
        name: str,
        timezone: str,
        catch_up: float,
        signal: asyncio.Event | None,
    ) -> None:
        """`item` is in wire format, without idempotency key and time."""
        check_schedule(cron, timezone, catch_up)
        self._calls = calls
        self._log = log
        self._cron = cron
        self._item = item
        self._name = name
        self._zone = _zone(timezone)
        self._catch_up = timedelta(seconds=catch_up)
        self._signal = signal

    def __await__(self) -> Generator[Any, None, None]:
        return self._run().__await__()

    def next(self, count: int = 1, after: datetime | None = None) -> list[datetime]:
        """The next ticks."""
        return _next_ticks(self._cron, (after or datetime.now(UTC)).astimezone(self._zone), count)

    async def _run(self) -> None:
        last = datetime.now(UTC) - self._catch_up
        while True:
            (tick,) = self.next(after=last)
            if not await self._sleep_until(tick - _LEAD_TIME):
                return
            last = tick
            if datetime.now(UTC) - tick > timedelta(seconds=MAX_CATCH_UP_SECONDS):
                self._log.warning(
                    "Schedule.tick",
                    f"tick {tick} of schedule {self._name} skipped: enqueue overdue",
                )
                continue
            if not await self._enqueue(tick):
                return

    async def _enqueue(self, tick: datetime) -> bool:
        """Enqueue a tick, retrying until a server responds; False if stopped."""
        item = {**self._item, "idempotency_key": self._key(tick), "deliver_after": tick}
        failures = 0
        while True:
            try:
                await self._calls.enqueue([item])
                return True
            except TRANSIENT as error:
                failures += 1
                self._log.warning(
                    "Schedule.tick", f"enqueue of tick {tick} of schedule {self._name} failed, retrying: {error}"
                )
                pause = self._calls.http.retry_delay(failures, error)
            if not await self._sleep_until(datetime.now(UTC) + timedelta(seconds=pause)):
                return False

    def _key(self, tick: datetime) -> str:
        return f"schedule:{self._name}:{tick.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"

    async def _sleep_until(self, until: datetime) -> bool:
        """Sleep; False if stopped meanwhile."""
        while (left := (until - datetime.now(UTC)).total_seconds()) > 0 and not self._stopped:
            try:
                async with asyncio.timeout(min(left, _MAX_SLEEP_SECONDS)):
                    await (self._signal.wait() if self._signal is not None else asyncio.Event().wait())
            except TimeoutError:
                continue
        return not self._stopped

    @property
    def _stopped(self) -> bool:
        return self._signal is not None and self._signal.is_set()


def _next_ticks(cron: str, after: datetime, count: int) -> list[datetime]:
    try:
        ticks = list(itertools.islice(CronSim(cron, after), count))
    except CronSimError as error:
        raise ValueError(
            f"{cron!r} is not a cron expression like '*/5 * * * *' (minute hour day month weekday): {error}"
        ) from error
    if len(ticks) < count:
        raise ValueError(f"{cron!r} never ticks again (like February 30)")
    return ticks


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise ValueError(f"{name!r} is not a time zone like 'Europe/Berlin' (or tzdata is not installed)") from error
