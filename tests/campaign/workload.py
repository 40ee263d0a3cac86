"""What every workload is: clients that make calls, and a checker that reads them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.campaign.client import Recorder
from tests.campaign.history import Call, History, Violation
from tests.campaign.site import Site

LEASE_SECONDS = 2
# After a kill, leases have to run out and workers to be started again; a busy machine takes its time for both.
IDLE_SECONDS = 4 * LEASE_SECONDS
_BACKOFF_SECONDS = 0.1


@dataclass
class Stage:
    """What workloads share: the site, the history, and whether it is time to end."""

    site: Site
    history: History
    seed: int
    pause: float = 0.05
    """Seconds that a client waits between two calls, on average."""
    produced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nothing more is to be produced."""
    healed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there are no more faults, all producers have ended, and nothing waits in a spool."""


class Workload(ABC):
    """One kind of load with its own queues. `hosts`, `shards`: what it needs of the site."""

    name: ClassVar[str]
    hosts: ClassVar[int] = 1
    shards: ClassVar[int] = 1
    one_shard: ClassVar[bool] = False
    """Whether its queues have to be on the same shard."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.site = stage.site
        self.history = stage.history
        self.chance = random.Random(f"{stage.seed}/{self.name}")
        self._recorders: list[Recorder] = []

    async def prepare(self) -> None:
        """Make what has to be there before the load; the site is whole."""
        return

    def writers(self) -> Sequence[Coroutine[Any, Any, None]]:
        """The clients that give others work. They end when `produced` is set; only then can others find nothing."""
        return ()

    @abstractmethod
    def clients(self) -> Sequence[Coroutine[Any, Any, None]]:
        """All other clients: they end when nothing has come for a while after `healed` was set."""

    @abstractmethod
    async def check(self) -> list[Violation]:
        """Read the final state, and compare it with the history."""

    def client(self, role: str, host: int = 0) -> Recorder:
        recorder = Recorder(self.history, f"{self.name}/{role}", self.site.urls[host % len(self.site.urls)])
        self._recorders.append(recorder)
        return recorder

    def calls(self, *ops: str) -> list[Call]:
        return list(self.history.of(self.name, *ops))

    async def pause(self) -> None:
        """The pause of a producer; it is over when nothing more is to be produced."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.chance.uniform(0.2, 1.8) * self.stage.pause):
                await self.stage.produced.wait()

    async def back_off(self) -> None:
        await asyncio.sleep(_BACKOFF_SECONDS)

    async def persist(self, client: Recorder, op: str, method: str, path: str, body: Any = None) -> Call:
        """A call that is made again until it succeeds."""
        while not (call := await client.call(op, {}, method, path, body)).ok:
            await self.back_off()
        return call

    async def configure(self, queue: str, **options: Any) -> None:
        body = {"queue": queue, "options": {"leaseTime": LEASE_SECONDS} | options}
        await self.persist(self.client("setup"), "setup", "POST", "/api/v1/configure", body)

    async def close(self) -> None:
        for recorder in self._recorders:
            await recorder.close()

    def idle(self) -> Idle:
        return Idle(self.stage)


class Idle:
    """Whether a consumer may end: no faults any more, and all it asked for longer than a lease lasts found nothing."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._empty_since: float | None = None
        self.long_enough = False

    def note(self, call: Call, got: object) -> None:
        """What a consumer asked for: only an answer that is empty counts as nothing."""
        now = self._stage.history.now()
        if not call.ok or got or not self._stage.healed.is_set():
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = now
        # Between two questions, not since one: who was cut off or rested has seen nothing of what came meanwhile.
        self.long_enough = self._empty_since is not None and now - self._empty_since > IDLE_SECONDS
