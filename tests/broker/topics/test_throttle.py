"""Tenants with much to do hold back, as far as those with little need it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from queen.broker.topics.throttle import TenantThrottle
from tests.support.clock import Clock

USUAL, SLOW = 0.001, 0.010


@pytest.fixture
def clock() -> Clock[float]:
    return Clock(1000.0)


def make(directory: Path, clock: Clock[float], worker: int = 0, longest: float = 4.0) -> TenantThrottle:
    return TenantThrottle(directory, worker, 2, longest, clock)


def serve(
    throttle: TenantThrottle,
    clock: Clock[float],
    seconds: float,
    *,
    windows: int,
    tenant: str = "quiet",
    beside: bool = True,
) -> None:
    """Ten requests of a quiet tenant in each window, each of which takes so long, beside one with much to do."""
    for _ in range(10 * windows):
        if beside:
            throttle.heavy_batch()
        throttle.served([tenant], seconds)
        clock.now += 0.011


def test_no_tenant_is_throttled_while_others_are_served_as_usual(tmp_path: Path, clock: Clock[float]) -> None:
    throttle = make(tmp_path, clock)
    assert throttle.pause_of("noisy") == 0
    serve(throttle, clock, USUAL, windows=20)
    assert throttle.pause_of("noisy") == 0


def test_pauses_grow_up_to_the_longest_while_others_are_served_slowly(tmp_path: Path, clock: Clock[float]) -> None:
    throttle = make(tmp_path, clock)
    serve(throttle, clock, USUAL, windows=5)
    serve(throttle, clock, SLOW, windows=2)
    assert 1 <= throttle.pause_of("noisy") < 4
    serve(throttle, clock, SLOW, windows=20)
    assert throttle.pause_of("noisy") == 4


def test_they_shrink_again_when_all_is_well(tmp_path: Path, clock: Clock[float]) -> None:
    throttle = make(tmp_path, clock)
    serve(throttle, clock, USUAL, windows=5)
    serve(throttle, clock, SLOW, windows=20)
    pauses = []
    for _ in range(8):
        serve(throttle, clock, USUAL, windows=50)
        pauses.append(throttle.pause_of("noisy"))
    assert pauses == sorted(pauses, reverse=True)
    assert pauses[-1] == 0


def test_they_shrink_for_one_that_is_served_seldom_as_well(tmp_path: Path, clock: Clock[float]) -> None:
    throttle = make(tmp_path, clock)
    serve(throttle, clock, USUAL, windows=5)
    serve(throttle, clock, SLOW, windows=20)
    assert throttle.pause_of("noisy") > 1
    for _ in range(60):
        clock.now += 0.9
        throttle.served(["quiet"], USUAL)
    assert throttle.pause_of("noisy") == 0


def test_one_that_is_served_seldom_is_noticed(tmp_path: Path, clock: Clock[float]) -> None:
    throttle = make(tmp_path, clock)
    serve(throttle, clock, USUAL, windows=5)
    pauses = []
    for _ in range(30):
        clock.now += 0.5
        throttle.heavy_batch()
        throttle.served(["quiet"], SLOW)
        pauses.append(throttle.pause_of("noisy"))
    assert max(pauses) >= 1


def test_one_in_twenty_may_take_long(tmp_path: Path, clock: Clock[float]) -> None:
    throttle = make(tmp_path, clock)
    for number in range(2000):
        throttle.heavy_batch()
        throttle.served(["quiet"], SLOW if number % 40 == 0 else USUAL)
        clock.now += 0.001
    assert throttle.pause_of("noisy") == 0


def test_a_tenant_does_not_hold_back_for_itself(tmp_path: Path, clock: Clock[float]) -> None:
    throttle = make(tmp_path, clock)
    serve(throttle, clock, USUAL, windows=5)
    serve(throttle, clock, SLOW, windows=10)
    assert throttle.pause_of("quiet") == 0
    assert throttle.pause_of("noisy") > 0


def test_nor_for_one_that_was_served_long_ago(tmp_path: Path, clock: Clock[float]) -> None:
    throttle = make(tmp_path, clock)
    serve(throttle, clock, USUAL, windows=5, tenant="gone")
    clock.now += 2
    serve(throttle, clock, SLOW, windows=20, tenant="busy")
    assert throttle.pause_of("busy") == 0
    assert throttle.pause_of("noisy") > 0


def test_nor_for_one_that_has_gone(tmp_path: Path, clock: Clock[float]) -> None:
    throttle = make(tmp_path, clock)
    serve(throttle, clock, USUAL, windows=5)
    serve(throttle, clock, SLOW, windows=10)
    clock.now += 2
    assert throttle.pause_of("noisy") == 0


def test_all_workers_of_a_host_hold_back(tmp_path: Path, clock: Clock[float]) -> None:
    here, there = make(tmp_path, clock, 0), make(tmp_path, clock, 1)
    serve(here, clock, USUAL, windows=5)
    serve(here, clock, SLOW, windows=10)
    assert there.pause_of("noisy") == here.pause_of("noisy") > 0


def test_what_has_become_usual_is_no_reason_to_hold_back(tmp_path: Path, clock: Clock[float]) -> None:
    throttle = make(tmp_path, clock)
    serve(throttle, clock, USUAL, windows=5)
    serve(throttle, clock, SLOW, windows=1500)
    assert throttle.pause_of("noisy") == 0


def test_slowness_without_heavy_tenants_throttles_none(tmp_path: Path, clock: Clock[float]) -> None:
    throttle = make(tmp_path, clock)
    serve(throttle, clock, USUAL, windows=5, beside=False)
    serve(throttle, clock, SLOW, windows=20, beside=False)
    assert throttle.pause_of("noisy") == 0


@pytest.mark.parametrize(("times", "holds_back"), [(1.3, False), (1.7, True)])
def test_where_it_is_known_how_tenants_are_served_in_calm_less_is_too_much(
    tmp_path: Path, clock: Clock[float], times: float, holds_back: bool
) -> None:
    throttle = make(tmp_path, clock)
    serve(throttle, clock, USUAL, windows=20, beside=False)
    serve(throttle, clock, times * USUAL, windows=20)
    assert (throttle.pause_of("noisy") > 0) is holds_back


def test_a_worker_that_has_seen_no_calm_asks_one_that_has(tmp_path: Path, clock: Clock[float]) -> None:
    here, there = make(tmp_path, clock, 0), make(tmp_path, clock, 1)
    serve(here, clock, USUAL, windows=20, beside=False)
    serve(there, clock, 1.7 * USUAL, windows=20)
    assert there.pause_of("noisy") > 0


def test_calm_that_was_long_ago_is_forgotten(tmp_path: Path, clock: Clock[float]) -> None:
    throttle = make(tmp_path, clock)
    serve(throttle, clock, USUAL, windows=20, beside=False)
    clock.now += 3600
    serve(throttle, clock, 1.7 * USUAL, windows=20)
    assert throttle.pause_of("noisy") == 0


def test_the_other_workers_know_of_heavy_tenants(tmp_path: Path, clock: Clock[float]) -> None:
    here, there = make(tmp_path, clock, 0), make(tmp_path, clock, 1)
    for seconds in [USUAL] * 50 + [SLOW] * 200:
        there.heavy_batch()
        here.served(["quiet"], seconds)
        clock.now += 0.011
    assert there.pause_of("noisy") > 0


def test_with_the_throttle_off_no_tenant_pauses(tmp_path: Path, clock: Clock[float]) -> None:
    throttle = make(tmp_path, clock, longest=0)
    serve(throttle, clock, USUAL, windows=5)
    serve(throttle, clock, SLOW, windows=20)
    assert throttle.pause_of("noisy") == 0


async def test_throttled_tenants_take_turns(tmp_path: Path, clock: Clock[float]) -> None:
    throttle = make(tmp_path, clock)
    asked: list[str] = []
    assert throttle.enter(lambda: asked.append("never"))
    first, second = (lambda: asked.append("first")), (lambda: asked.append("second"))
    assert not throttle.enter(first)
    assert not throttle.enter(second)
    assert not throttle.enter(first), "whoever asks twice is called once"
    throttle.leave(0.01)
    assert not asked
    await asyncio.sleep(0.05)
    assert asked == ["first", "second"]
    assert throttle.enter(first)


async def test_one_worker_of_a_host_has_the_floor(tmp_path: Path, clock: Clock[float]) -> None:
    """What holds back does so on all processors: a batch of another worker would keep others just the same."""
    here, there = make(tmp_path, clock, 0), make(tmp_path, clock, 1)
    asked: list[str] = []
    assert here.enter(lambda: None)
    assert not there.enter(lambda: asked.append("there"))
    await asyncio.sleep(0.01)
    assert asked == ["there"], "it is to ask again soon"
    assert not there.enter(lambda: None)
    here.leave(0.0)
    await asyncio.sleep(0.01)
    clock.now += 0.01
    assert not here.enter(lambda: None), "the other has waited longer"
    assert there.enter(lambda: None)
    there.leave(0.0)
    await asyncio.sleep(0.01)
    assert here.enter(lambda: None)


async def test_the_throttle_does_not_wait_for_a_worker_that_has_died_or_stopped(
    tmp_path: Path, clock: Clock[float]
) -> None:
    here, there, third = make(tmp_path, clock, 0), make(tmp_path, clock, 1), make(tmp_path, clock, 1)
    assert here.enter(lambda: None)
    assert not there.enter(lambda: None)
    clock.now += 0.9
    assert not there.enter(lambda: None)
    clock.now += 0.2
    assert there.enter(lambda: None), "it has waited long enough"
    here.close()
    assert third.enter(lambda: None), "its files were closed with it"
