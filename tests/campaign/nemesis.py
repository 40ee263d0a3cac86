"""Inflicts a schedule of faults on a site, and measures how long clients wait until all is well again."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

from tests.campaign.client import Recorder
from tests.campaign.faults import KINDS, Fault, NotNow
from tests.campaign.history import Call, History, Violation
from tests.campaign.site import Site
from tests.support.ageing import until

_RECOVERY_SECONDS = 60.0
_LONGEST_SECONDS = 180.0
_MOST_AT_ONCE = 3
TOGETHER = "several together"


class Nemesis:
    """Faults one after the other, some of them together; each is over before the next of its kind begins."""

    def __init__(self, site: Site, history: History, faults: Iterator[Fault]) -> None:
        self._site = site
        self._history = history
        self._faults = faults
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._probes = [Recorder(history, f"probe/{number}", url) for number, url in enumerate(site.urls)]
        self._running = 0
        """Faults that last, or whose recovery is measured."""
        self._active = 0
        self._overlapped = False
        self.inflicted: list[Fault] = []
        self.recoveries: defaultdict[str, list[float]] = defaultdict(list)
        self.violations: list[Violation] = []

    async def run(self, seconds: float) -> None:
        """Until the time is over, and everything that was harmed is whole."""
        give_up = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for fault in self._faults:
                await until(partial(self._has_room, fault), _LONGEST_SECONDS)
                await asyncio.sleep(min(fault.after, max(0.0, give_up - time.monotonic())))
                if time.monotonic() >= give_up:
                    break
                self._running += 1
                group.create_task(self._inflict(fault))
        for probe in self._probes:
            await probe.close()

    def _has_room(self, fault: Fault) -> bool:
        return self._running < (_MOST_AT_ONCE if fault.together else 1)

    async def _inflict(self, fault: Fault) -> None:
        try:
            await self._inflict_and_recover(fault)
        finally:
            self._running -= 1

    async def _inflict_and_recover(self, fault: Fault) -> None:
        kind = KINDS[fault.kind]
        async with self._locks[kind.harms]:
            self._active += 1
            self._overlapped |= self._active > 1
            call = self._history.begin("nemesis", fault.kind, {"number": fault.number, "lasts": round(fault.lasts, 3)})
            try:
                async with kind.inflict(self._site, fault):
                    self.inflicted.append(fault)
                call.ended = self._history.now()
            except NotNow:
                call.ended, call.error = self._history.now(), "not now"
                return
            except (RuntimeError, TimeoutError, OSError) as error:
                call.ended, call.error = self._history.now(), repr(error)
                self.violations.append(Violation("site", "not healed", f"after {fault.kind}: {error}", (call,)))
                return
            finally:
                self._active -= 1
                last = self._active == 0
                name = TOGETHER if self._overlapped else fault.kind
                if last:
                    self._overlapped = False
            if last:
                await self._recover(name, call)

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
