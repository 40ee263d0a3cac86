"""`topic(...).schedule(...)`: an item for every tick of a clock, however many clients run the same schedule."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from queen.client.config import ClientLog
from queen.client.errors import PASSING
from queen.client.topics.calls import TopicCalls
from queen.client.types import Deferred

LONGEST_CATCH_UP: Final = 3000.0
"""Seconds. The server remembers the key of a tick for an hour at least; what is older might be enqueued twice."""

# Ticks are enqueued ahead, so that a client that is restarted misses none.
_AHEAD: Final = timedelta(seconds=60)
# A clock may be set while this sleeps.
_LONGEST_SLEEP: Final = 30.0


class Schedule(Deferred[None]):
    """Runs when it is awaited, until the signal is set or the task is cancelled."""

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
        """`item` is as the server takes it, without key and time."""
        if not 0 <= catch_up <= LONGEST_CATCH_UP:
            raise ValueError(f"catch_up has to be from 0 to {LONGEST_CATCH_UP:.0f} seconds, not {catch_up}")
        self._calls = calls
        self._log = log
        self._cron = cron
        self._item = item
        self._name = name
        self._zone = _zone(timezone)
        self._catch_up = timedelta(seconds=catch_up)
        self._signal = signal
        self.next()

    def __await__(self) -> Generator[Any, None, None]:
        return self._run().__await__()

    def next(self, count: int = 1, after: datetime | None = None) -> list[datetime]:
        """The next ticks, to look at."""
        ticks = list(itertools.islice(self._ticks(after or datetime.now(UTC)), count))
        if len(ticks) < count:
            raise ValueError(f"{self._cron!r} has no tick any more, as a 30th of February would have none")
        return ticks

    async def _run(self) -> None:
        last = datetime.now(UTC) - self._catch_up
        while True:
            (tick,) = self.next(after=last)
            if not await self._slept_until(tick - _AHEAD):
                return
            last = tick
            if datetime.now(UTC) - tick > timedelta(seconds=LONGEST_CATCH_UP):
                self._log.warning("Schedule.tick", f"{self._name} misses {tick}: the server was away for too long")
                continue
            if not await self._enqueued(tick):
                return

    async def _enqueued(self, tick: datetime) -> bool:
        """Enqueue a tick, for as long as it takes a server to answer; False when it was to end."""
        item = {**self._item, "idempotency_key": self._key(tick), "deliver_after": tick}
        failures = 0
        while True:
            try:
                await self._calls.enqueue([item])
                return True
            except PASSING as error:
                failures += 1
                self._log.warning("Schedule.tick", f"{tick} of {self._name} is not enqueued yet: {error}")
                pause = self._calls.http.pause(failures, error)
            if not await self._slept_until(datetime.now(UTC) + timedelta(seconds=pause)):
                return False

    def _key(self, tick: datetime) -> str:
        return f"schedule:{self._name}:{tick.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"

    def _ticks(self, after: datetime) -> CronSim:
        try:
            return CronSim(self._cron, after.astimezone(self._zone))
        except CronSimError as error:
            raise ValueError(
                f"{self._cron!r} is no cron expression like '*/5 * * * *' (minute hour day month weekday): {error}"
            ) from error

    async def _slept_until(self, moment: datetime) -> bool:
        """False when it was to end meanwhile."""
        while (left := (moment - datetime.now(UTC)).total_seconds()) > 0 and not self._ended:
            try:
                async with asyncio.timeout(min(left, _LONGEST_SLEEP)):
                    await (self._signal.wait() if self._signal is not None else asyncio.Event().wait())
            except TimeoutError:
                continue
        return not self._ended

    @property
    def _ended(self) -> bool:
        return self._signal is not None and self._signal.is_set()


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise ValueError(f"{name!r} is no time zone like 'Europe/Berlin' (or tzdata is not installed)") from error
