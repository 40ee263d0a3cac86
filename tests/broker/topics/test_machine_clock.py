"""When something was accepted, by PostgreSQL's clock, however the clocks of the host are set meanwhile."""

from __future__ import annotations

import time

import pytest

from queen.broker.topics.buffered import ServerTime, boot_id, ticks

SERVER = 1_800_000_000.0


@pytest.fixture
def server() -> ServerTime:
    known = ServerTime()
    now = ticks()
    known.learn(SERVER, now, now + 0.001)
    return known


@pytest.mark.skipif(not boot_id(), reason="this system does not name its boots")
@pytest.mark.parametrize("step", [-86_400.0, 0.0, 86_400.0])
def test_a_wall_clock_that_steps_changes_nothing(server: ServerTime, step: float) -> None:
    moment = ticks() - 5
    told = server.at(boot_id(), moment, time.time() - 5 + step)
    assert told == pytest.approx(SERVER - 5, abs=1)


def test_what_is_from_before_the_machine_was_started_goes_by_the_wall_clock(server: ServerTime) -> None:
    told = server.at("another boot", ticks() + 1e6, time.time() - 60)
    assert told == pytest.approx(SERVER - 60, abs=5)


def test_what_seems_to_come_from_the_future_was_accepted_just_now(server: ServerTime) -> None:
    told = server.at("", ticks(), time.time() + 86_400)
    assert told == pytest.approx(SERVER, abs=5)


@pytest.mark.skipif(not boot_id(), reason="this system does not name its boots")
def test_answers_that_were_slow_do_not_move_the_past() -> None:
    known, start = ServerTime(), ticks()
    known.learn(SERVER, start, start + 0.01)
    before = known.at(boot_id(), start, 0)
    # It took seconds, of which nobody knows how many had passed when the clock was read.
    known.learn(SERVER + 3, start + 1, start + 3.5)
    assert known.at(boot_id(), start, 0) == before
    # It was quick, so that more is known than before.
    known.learn(SERVER + 4, start + 4.005, start + 4.006)
    assert known.at(boot_id(), start, 0) == pytest.approx(SERVER - 0.005)


@pytest.mark.skipif(not boot_id(), reason="this system does not name its boots")
@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_server_whose_clock_was_set_is_believed(step: float) -> None:
    known, start = ServerTime(), ticks()
    known.learn(SERVER, start, start + 0.01)
    known.learn(SERVER + 1 + step, start + 1, start + 1.01)
    assert known.at(boot_id(), start, 0) == pytest.approx(SERVER + step, abs=0.02)
