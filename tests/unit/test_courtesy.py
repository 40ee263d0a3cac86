"""Tenants with much to do hold back, as far as those with little need it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from queen.broker.topics.courtesy import Courtesy

USUAL, SLOW = 0.001, 0.010


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(directory: Path, clock: Clock, worker: int = 0, longest: float = 4.0) -> Courtesy:
    return Courtesy(directory, worker, 2, longest, clock)


def serve(courtesy: Courtesy, clock: Clock, seconds: float, *, windows: int, tenant: str = "quiet") -> None:
    """Ten requests of a quiet tenant in each window, each of which takes so long."""
    for _ in range(10 * windows):
        courtesy.served([tenant], seconds)
        clock.now += 0.011


def test_nobody_holds_back_while_others_are_served_as_usual(tmp_path: Path, clock: Clock) -> None:
    courtesy = make(tmp_path, clock)
    assert courtesy.pause_of("noisy") == 0
    serve(courtesy, clock, USUAL, windows=20)
    assert courtesy.pause_of("noisy") == 0


def test_pauses_grow_up_to_the_longest_while_others_are_served_slowly(tmp_path: Path, clock: Clock) -> None:
    courtesy = make(tmp_path, clock)
    serve(courtesy, clock, USUAL, windows=5)
    serve(courtesy, clock, SLOW, windows=2)
    assert 1 <= courtesy.pause_of("noisy") < 4
    serve(courtesy, clock, SLOW, windows=20)
    assert courtesy.pause_of("noisy") == 4


def test_they_shrink_again_when_all_is_well(tmp_path: Path, clock: Clock) -> None:
    courtesy = make(tmp_path, clock)
    serve(courtesy, clock, USUAL, windows=5)
    serve(courtesy, clock, SLOW, windows=20)
    pauses = []
    for _ in range(8):
        serve(courtesy, clock, USUAL, windows=50)
        pauses.append(courtesy.pause_of("noisy"))
    assert pauses == sorted(pauses, reverse=True)
    assert pauses[-1] == 0


def test_they_shrink_for_one_that_is_served_seldom_as_well(tmp_path: Path, clock: Clock) -> None:
    courtesy = make(tmp_path, clock)
    serve(courtesy, clock, USUAL, windows=5)
    serve(courtesy, clock, SLOW, windows=20)
    assert courtesy.pause_of("noisy") > 1
    for _ in range(60):
        clock.now += 0.9
        courtesy.served(["quiet"], USUAL)
    assert courtesy.pause_of("noisy") == 0


def test_one_that_is_served_seldom_is_noticed(tmp_path: Path, clock: Clock) -> None:
    courtesy = make(tmp_path, clock)
    serve(courtesy, clock, USUAL, windows=5)
    pauses = []
    for _ in range(30):
        clock.now += 0.5
        courtesy.served(["quiet"], SLOW)
        pauses.append(courtesy.pause_of("noisy"))
    assert max(pauses) >= 1


def test_one_in_twenty_may_take_long(tmp_path: Path, clock: Clock) -> None:
    courtesy = make(tmp_path, clock)
    for number in range(2000):
        courtesy.served(["quiet"], SLOW if number % 40 == 0 else USUAL)
        clock.now += 0.001
    assert courtesy.pause_of("noisy") == 0


def test_a_tenant_does_not_hold_back_for_itself(tmp_path: Path, clock: Clock) -> None:
    courtesy = make(tmp_path, clock)
    serve(courtesy, clock, USUAL, windows=5)
    serve(courtesy, clock, SLOW, windows=10)
    assert courtesy.pause_of("quiet") == 0
    assert courtesy.pause_of("noisy") > 0


def test_nor_for_one_that_was_served_long_ago(tmp_path: Path, clock: Clock) -> None:
    courtesy = make(tmp_path, clock)
    serve(courtesy, clock, USUAL, windows=5, tenant="gone")
    clock.now += 2
    serve(courtesy, clock, SLOW, windows=20, tenant="busy")
    assert courtesy.pause_of("busy") == 0
    assert courtesy.pause_of("noisy") > 0


def test_nor_for_one_that_has_gone(tmp_path: Path, clock: Clock) -> None:
    courtesy = make(tmp_path, clock)
    serve(courtesy, clock, USUAL, windows=5)
    serve(courtesy, clock, SLOW, windows=10)
    clock.now += 2
    assert courtesy.pause_of("noisy") == 0


def test_all_workers_of_a_host_hold_back(tmp_path: Path, clock: Clock) -> None:
    here, there = make(tmp_path, clock, 0), make(tmp_path, clock, 1)
    serve(here, clock, USUAL, windows=5)
    serve(here, clock, SLOW, windows=10)
    assert there.pause_of("noisy") == here.pause_of("noisy") > 0


def test_what_has_become_usual_is_no_reason_to_hold_back(tmp_path: Path, clock: Clock) -> None:
    courtesy = make(tmp_path, clock)
    serve(courtesy, clock, USUAL, windows=5)
    serve(courtesy, clock, SLOW, windows=1500)
    assert courtesy.pause_of("noisy") == 0


def test_where_it_is_turned_off_nobody_holds_back(tmp_path: Path, clock: Clock) -> None:
    courtesy = make(tmp_path, clock, longest=0)
    serve(courtesy, clock, USUAL, windows=5)
    serve(courtesy, clock, SLOW, windows=20)
    assert courtesy.pause_of("noisy") == 0


async def test_those_who_hold_back_take_turns(tmp_path: Path, clock: Clock) -> None:
    courtesy = make(tmp_path, clock)
    asked: list[str] = []
    assert courtesy.enter(lambda: asked.append("never"))
    first, second = (lambda: asked.append("first")), (lambda: asked.append("second"))
    assert not courtesy.enter(first)
    assert not courtesy.enter(second)
    assert not courtesy.enter(first), "whoever asks twice is called once"
    courtesy.leave(0.01)
    assert not asked
    await asyncio.sleep(0.05)
    assert asked == ["first", "second"]
    assert courtesy.enter(first)
