"""When partitions are examined: once they are due, and none is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queen.broker.maintenance.schedule import AT_ONCE, PAGE, Capacity, Memory, PushListener, Schedule, TimingWheel

SECONDS = 10.0
ROUNDING = 1e-6


@pytest.fixture
def push_listener() -> PushListener:
    return PushListener()


@pytest.fixture
def schedule(push_listener: PushListener) -> Iterator[Schedule]:
    """The schedule of a queue with partitions 1, 2 and 3, known since 100 and due from 150 on."""
    schedule = Schedule(SECONDS, Memory(Capacity(100), Capacity(10)), push_listener.listen(1), 100.0)
    assert schedule.due(100.0) == []
    assert meet(schedule, 1, 2, 3) == [1, 2, 3]
    for id_ in (1, 2, 3):
        schedule.check_again(id_, 50.0, 100.0, empty=True)
    yield schedule


def meet(schedule: Schedule, *ids: int, settled: bool = True, now: float = 100.0) -> list[int]:
    assert schedule.after is not None
    page = [(id_, settled) for id_ in ids if id_ > schedule.after]
    new, last = schedule.add_page(page, now)
    assert last == (len(page) < PAGE)
    return new


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 1e6))), st.lists(st.floats(0, 1e6)), st.floats(0.5, 60))
def test_an_agenda_gives_out_each_id_once_and_never_early(
    entries: list[tuple[int, float]], searches: list[float], grain: float
) -> None:
    capacity = Capacity(10_000)
    agenda = TimingWheel(grain, capacity)
    for entry in entries:
        assert agenda.put(*entry)
    left = list(entries)
    for now in sorted(searches):
        for id_ in agenda.take(now):
            # The same id may stand there twice: what comes out first is what was due first.
            left.remove(min((entry for entry in left if entry[0] == id_ and entry[1] <= now), key=itemgetter(1)))
        assert all(moment + grain > now - ROUNDING for _, moment in left)
    assert len(agenda) == len(left) == 10_000 - capacity.left


def test_an_agenda_takes_no_more_than_there_is_room_for() -> None:
    capacity = Capacity(1)
    first, second = TimingWheel(1.0, capacity), TimingWheel(1.0, capacity)
    assert first.put(1, AT_ONCE)
    assert not second.put(2, AT_ONCE)
    assert first.take(0.0) == [1]
    assert second.put(2, AT_ONCE)
    second.clear()
    assert capacity.left == 1


def test_a_partition_is_due_when_its_pause_is_over(schedule: Schedule) -> None:
    assert schedule.due(149.0) == []
    assert sorted(schedule.due(150.0)) == [1, 2, 3]
    schedule.check_again(2, 0.0, 150.0, empty=False)
    assert schedule.due(150.0) == [2]


def test_a_partition_that_is_gone_is_forgotten(schedule: Schedule) -> None:
    schedule.due(150.0)
    assert schedule.due(50_000.0) == []


def test_partitions_created_lately_are_listed_again_but_examined_once(schedule: Schedule) -> None:
    assert meet(schedule, 1, 2, 3, 5, settled=False) == [5]
    assert meet(schedule, 1, 2, 3, 4, 5, settled=False) == [4]
    assert meet(schedule, 1, 2, 3, 4, 5, settled=True) == []
    assert schedule.after == 5


def test_pages_go_on_where_the_last_ended(schedule: Schedule) -> None:
    many = range(10, 10 + PAGE)
    assert meet(schedule, *many, settled=False) == [*many]
    assert schedule.after == many[-1]
    assert meet(schedule, *many, 5000, settled=True) == [5000]


def test_a_push_brings_the_look_forward(schedule: Schedule, push_listener: PushListener) -> None:
    push_listener.pushed(1, 2)
    push_listener.pushed(7, 3)
    assert schedule.due(105.0) == []
    assert schedule.due(109.0) == []
    assert schedule.due(110.0) == [2]
    schedule.check_again(2, 20.0, 110.0, empty=False)
    assert schedule.due(130.0) == [2]
    schedule.check_again(2, 20.0, 130.0, empty=False)
    assert sorted(schedule.due(150.0)) == [1, 2, 3]


def test_a_partition_that_is_empty_again_is_left_to_the_agenda(schedule: Schedule, push_listener: PushListener) -> None:
    push_listener.pushed(1, 2)
    schedule.due(105.0)
    assert schedule.due(110.0) == [2]
    schedule.check_again(2, 20.0, 110.0, empty=True)
    assert schedule.due(149.0) == []
    assert sorted(schedule.due(150.0)) == [1, 2, 3]


def test_a_push_notified_before_its_partition_is_known_counts_once(
    schedule: Schedule, push_listener: PushListener
) -> None:
    push_listener.pushed(1, 4)
    schedule.due(105.0)
    assert schedule.due(110.0) == [4]
    schedule.check_again(4, 60.0, 110.0, empty=False)
    assert meet(schedule, 4) == [4]
    schedule.check_again(4, 60.0, 110.0, empty=False)
    assert 4 not in schedule.due(169.0)
    assert schedule.due(170.0) == [4]


def test_after_a_day_everything_is_examined_again(schedule: Schedule) -> None:
    assert schedule.due(100.0 + 86_401) == []
    assert schedule.after == 0


def test_without_room_the_queue_is_paged_through_again_and_again(push_listener: PushListener) -> None:
    memory = Memory(Capacity(2), Capacity(2))
    schedule = Schedule(SECONDS, memory, push_listener.listen(1), 100.0)
    for now in (100.0, 161.0):
        assert schedule.due(now) == []
        assert schedule.after == 0
        assert meet(schedule, 1, 2, 3, now=now) == [1, 2, 3]
        for id_ in (1, 2, 3):
            schedule.check_again(id_, 5.0, now, empty=False)
        assert memory.known.left == 2
    assert schedule.due(170.0) == []
    assert schedule.after is None


def test_the_push_listener_keeps_nothing_for_stopped_listeners(push_listener: PushListener) -> None:
    first, second = push_listener.listen(1), push_listener.listen(1)
    push_listener.pushed(1, 5)
    push_listener.stop(1, first)
    push_listener.pushed(1, 6)
    assert (first.take(), second.take()) == (set(), {5, 6})
    push_listener.stop(1, second)
    push_listener.pushed(1, 7)
    assert second.take() == set()
