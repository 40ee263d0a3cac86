"""Ids of topic items: sorted, unique, whatever the clock does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from queen.wire.ids import EPOCH_MS, SnowflakeSource
from tests.support.clock import Clock

START = EPOCH_MS + 1_000_000


def time_of_id(id: int) -> int:
    return (id >> 22) + EPOCH_MS


def test_an_id_holds_its_time_its_node_and_its_sequence() -> None:
    clock = Clock(START)
    source = SnowflakeSource(clock)
    source.grant(777, START, START + 1000)
    clock.now += 5
    ids = source.take(3)
    assert ids is not None
    assert [time_of_id(id) for id in ids] == [START + 5] * 3
    assert [id >> 12 & 1023 for id in ids] == [777] * 3
    assert [id & 4095 for id in ids] == [0, 1, 2]


def test_more_ids_than_a_millisecond_has_run_over_into_the_next() -> None:
    source = SnowflakeSource(Clock(START))
    source.grant(1, START, START + 1000)
    ids = source.take(10_000)
    assert ids is not None
    assert ids == sorted(set(ids))
    assert time_of_id(ids[-1]) == START + 2


def test_a_clock_that_steps_back_repeats_nothing() -> None:
    clock = Clock(START)
    source = SnowflakeSource(clock)
    source.grant(1, START, START + 60_000)
    clock.now += 100
    before = source.take(5)
    clock.now -= 3_600_000
    after = source.take(5)
    assert before is not None and after is not None
    assert min(after) > max(before)


def test_nothing_is_made_beyond_the_stretch_that_was_granted() -> None:
    clock = Clock(START)
    source = SnowflakeSource(clock)
    assert source.take(1) is None, "nothing was granted yet"
    source.grant(1, START, START + 10)
    clock.now += 10
    assert source.take(1) is None
    clock.now -= 1
    assert source.take(4096) is not None
    assert source.take(1) is None


def test_the_end_of_a_stretch_is_kept_for_when_there_is_no_other() -> None:
    clock = Clock(START)
    source = SnowflakeSource(clock)
    assert source.take_kept(1, keep_ms=10) is None, "nothing was granted yet"
    source.grant(1, START, START + 30)
    before = source.take(3, keep_ms=10)
    clock.now += 20
    assert source.take(1, keep_ms=10) is None
    clock.now += 3_600_000
    kept = source.take_kept(5, keep_ms=10)
    more = source.take_kept(10 * 4096 - 5, keep_ms=10)
    assert before is not None and kept is not None and more is not None
    assert max(before) < min(kept) <= max(kept) < min(more)
    assert time_of_id(kept[0]) == START + 20 and time_of_id(more[-1]) == START + 29
    assert source.take_kept(1, keep_ms=10) is None


steps = st.lists(st.tuples(st.integers(0, 2), st.integers(-5000, 5000), st.integers(1, 9000)), min_size=1, max_size=60)


@given(steps)
def test_workers_with_clocks_that_jump_never_make_the_same_id(history: list[tuple[int, int, int]]) -> None:
    """Three workers and the reservations that PostgreSQL would give them, of two nodes only."""
    reserved = {0: 0, 1: 0}
    clocks = [Clock(START) for _ in range(3)]
    sources = [SnowflakeSource(clock) for clock in clocks]
    made: set[int] = set()
    for worker, jump, count in history:
        clocks[worker].now = max(EPOCH_MS, clocks[worker].now + jump)
        ids = sources[worker].take(count)
        if ids is None:
            node = min(reserved, key=lambda node: reserved[node])
            start = max(reserved[node], sources[worker].now_ms())
            reserved[node] = start + 1000
            sources[worker].grant(node, start, start + 1000)
            ids = sources[worker].take(count)
        assert ids is not None
        assert not made & set(ids)
        made |= set(ids)
