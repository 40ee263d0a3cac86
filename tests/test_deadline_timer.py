"""Timers for moments that may have passed already, on the event loop that the server runs on."""

from __future__ import annotations

import asyncio

from queen.broker.pop.lanes import Holds, Lane
from queen.broker.pop.scanner import HoldTimer
from queen.concurrency import DeadlineTimer


async def test_a_timer_set_again_to_a_moment_that_has_passed_rings_once() -> None:
    rung: list[None] = []
    timer = DeadlineTimer(lambda: rung.append(None))
    now = asyncio.get_running_loop().time()
    for at in (now - 1, now - 2, now + 3600):
        timer.set(at)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(rung) == 1


async def test_a_timer_rings_at_the_earliest_of_its_moments_and_can_be_set_again() -> None:
    loop = asyncio.get_running_loop()
    rung = asyncio.Event()
    timer = DeadlineTimer(rung.set)
    timer.set(loop.time() + 3600)
    timer.set(loop.time() + 0.01)
    await rung.wait()
    rung.clear()
    timer.set(loop.time() + 0.01)
    await rung.wait()


async def test_a_cancelled_timer_does_not_ring() -> None:
    rung: list[None] = []
    timer = DeadlineTimer(lambda: rung.append(None))
    timer.set(0.0)
    timer.cancel()
    timer.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert rung == []


async def test_holds_that_have_ended_already_free_their_partitions() -> None:
    holds, lane = Holds(), Lane(1, "orders", 1, "group")
    freed: list[Lane] = []
    timer = HoldTimer(holds, freed.append)
    past = asyncio.get_running_loop().time() - 1
    for partition_id in (1, 2):
        holds.add(lane, partition_id, past)
        timer.arm()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sorted(lane.ready) == [1, 2]
    assert freed == [lane]
