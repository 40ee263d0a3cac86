"""Inflicts a schedule of faults on a site, and measures how long clients wait until all is well again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import asyncpg
import psutil

from tests.campaign.client import Recorder
from tests.campaign.faults import KINDS, Fault, Lane, NotNow, lanes, lanes_of, schedule, storm_schedule, takes_host_down
from tests.campaign.history import Call, History, Violation
from tests.campaign.site import Node, Site
from tests.support.ageing import until

_RECOVERY_SECONDS = 60.0
_LONGEST_SECONDS = 180.0
_INIT_SECONDS = 0.5
_MOST_AT_ONCE = 3
_CALM_SECONDS = 10.0
_STORM_SECONDS = 25.0
TOGETHER = "several together"
STORM = "storm"


class Nemesis:
    """Faults one after the other, some of them together, with recoveries measured; then storms, in which everything is
    harmed at once. A fault is over before the next one on the same thing begins."""

    def __init__(
        self, site: Site, history: History, seed: int, kinds: Sequence[str], pace: float, *, storms: bool
    ) -> None:
        self._site = site
        self._history = history
        self._with_storms = storms
        self._faults = schedule(seed, kinds, pace)
        self._storms = {
            lane: storm_schedule(seed, lane, kinds, pace) for lane in lanes(kinds, len(site.hosts)) if kinds
        }
        self._locks: defaultdict[Lane, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._starting = asyncio.Lock()
        self._probes = [Recorder(history, f"probe/{number}", url) for number, url in enumerate(site.urls)]
        self._running = 0
        """Faults that last, or whose recovery is measured."""
        self._active = 0
        self._overlapped = False
        self.inflicted: list[str] = []
        """Kinds of faults that have hit."""
        self.in_storms: list[str] = []
        self.recoveries: defaultdict[str, list[float]] = defaultdict(list)
        self.violations: list[Violation] = []

    async def run(self, seconds: float) -> None:
        """Until the time is over, and everything that was harmed is whole."""
        watching = asyncio.create_task(self._start_what_has_ended())
        try:
            await self._run(time.monotonic() + seconds)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        for probe in self._probes:
            await probe.close()

    async def _run(self, give_up: float) -> None:
        if not self._with_storms:
            await self._calm(give_up)
        while self._storms and time.monotonic() < give_up:
            await self._calm(min(give_up, time.monotonic() + _CALM_SECONDS))
            await self._storm(min(give_up, time.monotonic() + _STORM_SECONDS))

    async def _start_what_has_ended(self) -> None:
        """As an init system does. Without room on its disk PostgreSQL ends; commits wait for a standby that has."""
        while True:
            await asyncio.sleep(_INIT_SECONDS)
            for node in self._site.nodes:
                if node.has_ended:
                    async with self._locks[Lane("postgres")]:
                        await self._start(node)

    async def _start(self, node: Node) -> None:
        if not node.has_ended:
            return
        call = self._history.begin("nemesis", "start", {"node": node.directory.name})
        try:
            await node.start_again()
        except TimeoutError as error:
            self.violations.append(Violation("site", "not healed", f"PostgreSQL does not start: {error}", (call,)))
        call.ended = self._history.now()

    async def _calm(self, give_up: float) -> None:
        async with asyncio.TaskGroup() as group:
            for fault in self._faults:
                await until(partial(self._has_room, fault), _LONGEST_SECONDS)
                await asyncio.sleep(min(fault.after, max(0.0, give_up - time.monotonic())))
                if time.monotonic() >= give_up:
                    break
                self._running += 1
                group.create_task(self._inflict_and_recover(fault))

    def _has_room(self, fault: Fault) -> bool:
        return self._running < (_MOST_AT_ONCE if fault.together else 1)

    async def _storm(self, give_up: float) -> None:
        async def lane(faults: Iterator[Fault]) -> None:
            for fault in faults:
                await asyncio.sleep(min(fault.after, max(0.0, give_up - time.monotonic())))
                if time.monotonic() >= give_up:
                    break
                if takes_host_down(fault.kind) and self._starting.locked():
                    continue
                if await self._strike(fault):
                    self.in_storms.append(fault.kind)

        call = self._history.begin("nemesis", STORM, {})
        async with asyncio.TaskGroup() as group:
            for faults in self._storms.values():
                group.create_task(lane(faults))
        call.ended = self._history.now()
        await self._recover(STORM, call)

    async def _inflict_and_recover(self, fault: Fault) -> None:
        try:
            call = await self._strike(fault)
            if self._active == 0:
                name = TOGETHER if self._overlapped else fault.kind
                self._overlapped = False
                if call is not None:
                    await self._recover(name, call)
        finally:
            self._running -= 1

    async def _strike(self, fault: Fault) -> Call | None:
        """Inflict it; the call that the history has of it, when it has hit."""
        async with self._holding(fault):
            call = self._history.begin("nemesis", fault.kind, {"number": fault.number, "lasts": round(fault.lasts, 3)})
            try:
                await KINDS[fault.kind].inflict(self._site, fault)
                self.inflicted.append(fault.kind)
                return call
            except NotNow:
                call.error = "not now"
            except (RuntimeError, TimeoutError, OSError, psutil.Error, asyncpg.PostgresError) as error:
                call.error = repr(error)
                self.violations.append(Violation("site", "not healed", f"after {fault.kind}: {error}", (call,)))
            finally:
                call.ended = self._history.now()
            return None

    @asynccontextmanager
    async def _holding(self, fault: Fault) -> AsyncIterator[None]:
        """What is harmed is harmed by nothing else meanwhile."""
        async with contextlib.AsyncExitStack() as stack:
            if takes_host_down(fault.kind):
                # While one host starts, another serves: with none there would be nothing to harm.
                await stack.enter_async_context(self._starting)
            for lane in lanes_of(fault.kind, fault.target, len(self._site.hosts)):
                await stack.enter_async_context(self._locks[lane])
            self._active += 1
            self._overlapped |= self._active > 1
            try:
                yield
            finally:
                self._active -= 1

    async def _recover(self, name: str, fault: Call) -> None:
        """How long it takes until a message goes all the way again, by every host."""
        over, attempt = time.monotonic(), 0
        for probe in self._probes:
            while not await self._works(probe, f"{fault.number}-{attempt}"):
                attempt += 1
                if self._active:
                    return
                if time.monotonic() - over > _RECOVERY_SECONDS:
                    text = f"after {name} nothing worked for {_RECOVERY_SECONDS:.0f} s"
                    self.violations.append(Violation("site", "no recovery", text, (fault,)))
                    return
                await asyncio.sleep(0.02)
        self.recoveries[name].append(time.monotonic() - over)

    async def _works(self, probe: Recorder, attempt: str) -> bool:
        partition = f"{probe.name.rpartition('/')[2]}-{attempt}"
        item = {"queue": "probe", "partition": partition, "payload": 1, "transactionId": partition}
        args = {"partition": partition}
        pushed = await probe.call("probe-push", args, "POST", "/api/v1/push", {"items": [item]})
        # What waits in the spool is safe, but not there yet.
        if not pushed.ok or pushed.answer[0]["status"] not in ("queued", "duplicate"):
            return False
        path = f"/api/v1/pop/queue/probe/partition/{partition}"
        popped = await probe.call("probe-pop", args, "GET", path, query={"wait": True, "timeout": 500})
        if not popped.ok or not popped.answer:
            return False
        (message,) = popped.answer["messages"]
        ack = {key: message[key] for key in ("transactionId", "partitionId", "leaseId")}
        acked = await probe.call("probe-ack", args, "POST", "/api/v1/ack", ack)
        return acked.ok and bool(acked.answer[0]["success"])
