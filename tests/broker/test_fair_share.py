"""Group commit that is fair among tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from queen.broker.batcher import Batcher
from queen.broker.topics.batching import LIGHT, FairShare
from queen.broker.topics.throttle import TenantThrottle
from queen.errors import Overloaded
from tests.support.ageing import until
from tests.support.clock import Clock

MUCH = LIGHT + 1


@dataclass(eq=False)
class Work:
    """A piece of work of a tenant."""

    tenant: str
    number: int
    weight: int = 1
    answer: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


def fair(
    run: Callable[[list[Work]], Awaitable[None]],
    limit: int = 100,
    share: int = 100,
    most: int = 1000,
    throttle: TenantThrottle | None = None,
) -> Batcher[Work]:
    return Batcher(
        run,
        weigh=lambda work: work.weight,
        limit=limit,
        most=most,
        backlog=(throttle.fair_share if throttle is not None else FairShare)(
            lambda work: work.tenant, lambda work: work.weight, limit=limit, share=share
        ),
    )


@dataclass
class Stage:
    """Runs batches on request, and records them."""

    begun: list[list[Work]] = field(default_factory=list)
    gates: list[asyncio.Event] = field(default_factory=list)

    def batcher(
        self, limit: int = 100, share: int = 100, most: int = 1000, throttle: TenantThrottle | None = None
    ) -> Batcher[Work]:
        return fair(self.run, limit, share, most, throttle)

    async def run(self, batch: list[Work]) -> None:
        gate = asyncio.Event()
        self.begun.append(batch)
        self.gates.append(gate)
        await gate.wait()

    async def shown(self) -> list[list[tuple[str, int]]]:
        """What has begun once everything that can begin has."""
        for _ in range(5):
            await asyncio.sleep(0)
        return [[(work.tenant, work.number) for work in batch] for batch in self.begun]


async def test_what_arrives_together_goes_together_and_in_order() -> None:
    stage = Stage()
    batcher = stage.batcher()
    for number in range(3):
        batcher.submit(Work("a", number))
        batcher.submit(Work("b", number))
    assert await stage.shown() == [[("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]]


async def test_quiet_tenant_does_not_wait_for_the_batch_of_a_noisy_one() -> None:
    stage = Stage()
    batcher = stage.batcher()
    batcher.submit(Work("noisy", 0, MUCH))
    await stage.shown()
    batcher.submit(Work("noisy", 1, MUCH))
    batcher.submit(Work("quiet", 0))
    assert await stage.shown() == [[("noisy", 0)], [("quiet", 0)]]
    batcher.submit(Work("quiet", 1))
    stage.gates[1].set()
    assert (await stage.shown())[2:] == [[("quiet", 1)]]
    stage.gates[0].set()
    assert (await stage.shown())[3:] == [[("noisy", 1)]]


async def test_noisy_tenants_never_take_the_place_of_quiet_ones() -> None:
    stage = Stage()
    batcher = stage.batcher(limit=MUCH)
    for tenant in ("a", "b", "c"):
        batcher.submit(Work(tenant, 0, MUCH))
    assert await stage.shown() == [[("a", 0)]]
    batcher.submit(Work("quiet", 0))
    assert await stage.shown() == [[("a", 0)], [("quiet", 0)]]


async def test_tenant_is_in_one_batch_at_a_time_whether_it_has_much_or_little() -> None:
    stage = Stage()
    batcher = stage.batcher(share=1)
    batcher.submit(Work("a", 0, MUCH))
    batcher.submit(Work("a", 1))
    assert await stage.shown() == [[("a", 0)]]
    stage.gates[0].set()
    assert await stage.shown() == [[("a", 0)], [("a", 1)]]


@pytest.mark.parametrize("weight", [1, MUCH])
async def test_tenants_are_taken_in_turn_with_equal_shares(weight: int) -> None:
    backlog = FairShare[Work](lambda work: work.tenant, lambda work: work.weight, limit=4 * weight, share=100)
    for tenant in ("a", "b", "c", "d", "e"):
        for number in range(20):
            slot = backlog.add(Work(tenant, number, weight), weight)
    assert slot == int(weight > 1)
    taken = []
    while backlog.ready(slot, lambda: None):
        batch, total = backlog.take(slot)
        assert total == len(batch) * weight
        taken.append([(work.tenant, work.number) for work in batch])
        backlog.done(slot)
    assert taken[:2] == [[("a", 0), ("b", 0), ("c", 0), ("d", 0)], [("e", 0), ("a", 1), ("b", 1), ("c", 1)]]
    assert len(taken) == 25 and len(backlog) == 0


async def test_big_request_is_taken_whole() -> None:
    stage = Stage()
    batcher = stage.batcher(limit=10, share=5)
    batcher.submit(Work("a", 0, weight=500))
    batcher.submit(Work("a", 1))
    batcher.submit(Work("b", 0))
    assert sorted(await stage.shown()) == [[("a", 0)], [("b", 0)]]


async def test_too_much_that_waits_is_refused() -> None:
    batcher = Stage().batcher(most=2)
    batcher.submit(Work("a", 0, weight=2))
    with pytest.raises(Overloaded):
        batcher.submit(Work("b", 0))


async def test_a_failed_batch_is_reported_and_the_next_runs() -> None:
    done: list[int] = []

    async def run(batch: list[Work]) -> None:
        if any(work.number == 1 for work in batch):
            raise RuntimeError("no")
        done.extend(work.number for work in batch)

    batcher = fair(run, limit=1, share=1, most=10)
    works = [Work(str(number), number) for number in range(4)]
    for work in works:
        batcher.submit(work)
    await batcher.join()
    assert sorted(done) == [0, 2, 3]
    assert str(works[1].answer.exception()) == "no"


class TestThrottle:
    """A noisy tenant beside a quiet one that is served slowly."""

    @pytest.fixture
    def clock(self) -> Clock[float]:
        return Clock(1000.0)

    @pytest.fixture
    def throttle(self, tmp_path: Path, clock: Clock[float]) -> TenantThrottle:
        return TenantThrottle(tmp_path, 0, 1, 4.0, clock)

    @pytest.fixture(autouse=True)
    def annoy(self, throttle: TenantThrottle, clock: Clock[float]) -> None:
        for seconds in (0.001, 0.001, 0.1, 0.1, 0.1):
            for _ in range(6):
                throttle.served(["quiet"], seconds)
            clock.now += 0.11
            throttle.heavy_batch()
            throttle.served(["quiet"], seconds)
        assert throttle.pause_of("noisy") >= 1

    async def test_has_one_small_batch_at_a_time_over_all_lanes_and_pauses(self, throttle: TenantThrottle) -> None:
        stage = Stage()
        batchers = [stage.batcher(limit=5000, share=1000, most=10_000, throttle=throttle) for _ in range(2)]
        for number in range(4):
            for batcher in batchers:
                batcher.submit(Work("noisy", number, MUCH))
        assert await stage.shown() == [[("noisy", 0), ("noisy", 1)]]
        await asyncio.sleep(0.5)
        stage.gates[0].set()
        assert len(await stage.shown()) == 1, "it pauses as long as the batch took"
        await until(lambda: len(stage.begun) == 2)
        assert (await stage.shown())[1:] == [[("noisy", 0), ("noisy", 1)]], "then the other batcher has its turn"
        batchers[0].submit(Work("quiet", 9))
        assert (await stage.shown())[2:] == [[("quiet", 9)]], "who has little to do does not wait for any of it"
        for gate in stage.gates:
            gate.set()

    async def test_everything_is_done_in_the_end(self, throttle: TenantThrottle) -> None:
        done: list[int] = []

        async def run(batch: list[Work]) -> None:
            done.extend(work.number for work in batch)

        batcher = fair(run, 5000, 1000, 100_000, throttle)
        for number in range(50):
            batcher.submit(Work("noisy", number, MUCH))
        async with asyncio.timeout(100):
            await batcher.join()
        assert done == list(range(50))
