"""The circuit breaker: three failures open it, ten seconds later one attempt decides."""

from __future__ import annotations

from queen.spool.drainer import Breaker, BreakerState
from tests.support.clock import Clock


def test_three_failures_in_a_row_open_it_and_one_success_starts_the_count_again() -> None:
    seen: list[BreakerState] = []
    breaker = Breaker(seen.append, clock=Clock(100.0))
    for _ in range(2):
        breaker.failed()
    breaker.succeeded()
    for _ in range(2):
        breaker.failed()
        assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()
    assert seen == [BreakerState.OPEN]


def test_after_ten_seconds_one_attempt_decides() -> None:
    clock = Clock(100.0)
    breaker = Breaker(lambda state: None, clock=clock)
    for _ in range(3):
        breaker.failed()
    clock.now += 9.9
    assert not breaker.allows()
    clock.now += 0.1
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows(), "one failure is enough to open it again"
    clock.now += 10
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED and breaker.allows()


def test_an_attempt_can_be_made_at_once_when_the_cause_is_over() -> None:
    breaker = Breaker(lambda state: None, clock=Clock(100.0))
    breaker.half_open()
    assert breaker.state is BreakerState.CLOSED, "there was nothing to try"
    for _ in range(3):
        breaker.failed()
    breaker.half_open()
    assert breaker.allows()
