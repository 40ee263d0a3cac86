"""What a worker believes is ready for a group."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from queen.broker.pop.lanes import UNKNOWN, Holds, Lane
from queen.broker.pop.requests import Pop, PopRequest
from queen.metrics.meter import Meter


def lane() -> Lane:
    return Lane(1, "orders", 1, "group")


async def parked_pop(partition: str | None = None) -> Pop:
    answer = asyncio.get_running_loop().create_future()
    return Pop(PopRequest(("orders",), partition, "group"), lambda body: body, answer, Meter())


def test_partitions_are_ready_in_the_order_in_which_they_were_fed() -> None:
    orders = lane()
    for partition_id in (3, 1, 2, 1, 3):
        orders.pushed(partition_id, 5)
    assert list(orders.ready.items()) == [(3, 10), (1, 10), (2, 5)]


def test_a_held_partition_is_not_ready_until_it_is_freed() -> None:
    orders = lane()
    orders.hold(1, 10.0)
    orders.pushed(1, 5)
    assert 1 not in orders.ready
    orders.free(1, 0)
    assert 1 in orders.ready


def test_a_freed_partition_with_nothing_in_it_is_not_ready() -> None:
    orders = lane()
    orders.hold(1, 10.0)
    orders.free(1, 0)
    assert 1 not in orders.ready
    orders.pushed(1, 1)
    assert 1 in orders.ready


def test_what_was_ready_when_the_hold_began_is_remembered() -> None:
    orders = lane()
    orders.pushed(1, 5)
    orders.hold(1, 10.0)
    assert 1 not in orders.ready
    orders.free(1, 0)
    assert 1 in orders.ready


def test_a_hold_that_ends_makes_its_partition_worth_a_look() -> None:
    holds, orders = Holds(), lane()
    holds.add(orders, 1, 10.0)
    assert holds.next_at() == 10.0
    assert holds.expire(9.9) == set()
    assert holds.expire(10.0) == {orders}
    assert orders.ready == {1: UNKNOWN}


def test_a_hold_that_was_lifted_or_lengthened_ends_nothing() -> None:
    holds, orders = Holds(), lane()
    holds.add(orders, 1, 10.0)
    orders.free(1, 0)
    assert holds.expire(10.0) == set()
    holds.add(orders, 2, 20.0)
    holds.add(orders, 2, 30.0)
    assert holds.expire(25.0) == set()
    assert holds.expire(30.0) == {orders}


def test_what_another_worker_took_from_is_tried_when_nothing_else_is_ready() -> None:
    orders = lane()
    for partition_id in (1, 2, 3):
        orders.pushed(partition_id, 5)
    orders.mark_stale(1)
    orders.mark_stale(7)
    assert list(orders.ready) == [2, 3] and not orders.retry_stale()
    orders.mark_stale(2)
    orders.pushed(2, 1)
    assert orders.ready[2] == 1, "what came later is not doubted"
    orders.ready.clear()
    assert orders.retry_stale()
    assert orders.ready == {1: 5} and not orders.stale
    for partition_id in range(1000):
        orders.pushed(partition_id, 1)
        orders.mark_stale(partition_id)
    assert not orders.retry_stale(), "to ask for so many costs less than to try them"


def test_holds_that_were_lifted_early_do_not_pile_up() -> None:
    holds, orders = Holds(), lane()
    for number in range(50_000):
        holds.add(orders, number % 10, 1000.0 + number)
        orders.free(number % 10, 0)
    assert len(holds) < 10_000
    holds.add(orders, 5, 500.0)
    assert holds.next_at() == 500.0
    assert holds.expire(500.0) == {orders}


def test_holds_that_are_still_on_are_all_kept() -> None:
    holds, orders = Holds(), lane()
    for number in range(20_000):
        holds.add(orders, number, float(number))
    assert len(holds) == 20_000
    holds.expire(20_000.0)
    assert len(orders.ready) == 20_000


def test_a_partition_freed_while_it_is_being_claimed_is_worth_another_look() -> None:
    orders = lane()
    orders.pushed(1, 1)
    del orders.ready[1]
    orders.claiming.add(1)
    orders.free(1, 0)
    assert orders.claimed(1)
    assert not orders.claimed(1)
    orders.claiming.add(2)
    assert not orders.claimed(2)
    assert orders.claiming == set()


async def test_a_lane_has_work_when_a_pop_waits_and_a_partition_is_ready() -> None:
    orders = lane()
    assert not orders.has_work
    orders.pushed(1, 1)
    assert not orders.has_work
    orders.waiting.append(await parked_pop())
    assert orders.has_work


async def test_pops_that_were_answered_are_swept_away() -> None:
    orders = lane()
    alive, gone = await parked_pop(), await parked_pop()
    gone.resolve(None)
    orders.waiting.extend([gone, alive])
    orders.unresolved["p"] = [gone]
    orders.sweep()
    assert list(orders.all_parked()) == [alive]
    assert orders.parked == 1


async def test_a_pop_whose_time_is_up_during_a_claim_still_takes_what_the_claim_brings() -> None:
    pop = await parked_pop()
    pop.busy = True
    pop.expire()
    assert not pop.done
    pop.resolve(b"{}")
    assert await pop.answer == b"{}"


events = st.lists(
    st.tuples(
        st.sampled_from(["feed", "free", "hold", "expire", "mark", "retry"]),
        st.integers(1, 3),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(events)
def test_a_partition_that_has_something_is_never_forgotten(several: list[tuple[str, int, int]]) -> None:
    """Every message that was fed is either ready, or remembered for when the hold ends."""
    holds, orders, clock = Holds(), lane(), 0.0
    fed: set[int] = set()
    for what, partition_id, number in several:
        clock += 1.0
        if what == "feed":
            orders.pushed(partition_id, number + 1)
            fed.add(partition_id)
        elif what == "free":
            orders.free(partition_id, number)
        elif what == "hold":
            holds.add(orders, partition_id, clock + number)
        elif what == "mark":
            orders.mark_stale(partition_id)
        elif what == "retry":
            orders.retry_stale()
        else:
            holds.expire(clock)
        assert not (orders.ready.keys() | orders.stale.keys()) & orders.held.keys()
        assert not orders.ready.keys() & orders.stale.keys()
        for partition in fed:
            assert partition in orders.ready or partition in orders.stale or partition in orders.held
    holds.expire(clock + 100)
    if not orders.ready:
        orders.retry_stale()
    assert fed <= orders.ready.keys() | orders.stale.keys()


async def test_a_lane_lets_go_of_a_pop_that_was_answered() -> None:
    orders, pop = lane(), await parked_pop()
    orders.admit(pop)
    assert orders.nonblocking_pops() == [pop]
    pop.resolve(b"a long answer")
    assert not orders.nonblocking
    assert not pop.lanes
