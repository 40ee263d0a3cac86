"""Group commit: what is done while a batch waits for its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from queen.broker.batcher import Batcher


class Stage:
    """A fusion of numbers that remembers what it was asked to do, in order."""

    def __init__(self, turn: asyncio.Lock) -> None:
        self.events: list[tuple[str, tuple[int, ...]]] = []
        self.batcher: Batcher[int] = Batcher(
            self._run,
            lambda item, error: self.events.append(("failed", (item,))),
            limit=100,
            turn=turn,
            meanwhile=lambda waiting: self.events.append(("ahead", tuple(waiting))),
        )

    async def _run(self, batch: list[int]) -> Callable[[], None]:
        self.events.append(("run", tuple(batch)))
        await asyncio.sleep(0)
        return lambda: self.events.append(("answered", tuple(batch)))


async def test_what_waits_for_its_turn_is_made_ready_meanwhile() -> None:
    turn = asyncio.Lock()
    stage = Stage(turn)
    async with turn:
        stage.batcher.submit(1)
        await asyncio.sleep(0)
        # This one comes just in time, the third is late.
        stage.batcher.submit(2)
        await asyncio.sleep(0.01)
        stage.batcher.submit(3)
        await asyncio.sleep(0.01)
        assert stage.events == [("ahead", (1, 2))]
    await stage.batcher.join()
    assert stage.events[1:] == [("run", (1, 2, 3)), ("answered", (1, 2, 3))]


async def test_whoever_need_not_wait_makes_nothing_ready() -> None:
    stage = Stage(asyncio.Lock())
    stage.batcher.submit(1)
    await stage.batcher.join()
    assert stage.events == [("run", (1,)), ("answered", (1,))]


async def test_more_than_a_batch_holds_is_not_made_ready() -> None:
    turn = asyncio.Lock()
    stage = Stage(turn)
    async with turn:
        for number in range(101):
            stage.batcher.submit(number)
        await asyncio.sleep(0.01)
        assert not stage.events
    await stage.batcher.join()
    assert [len(items) for what, items in stage.events if what == "run"] == [100, 1]


async def test_an_answer_comes_when_the_turn_has_been_passed_on() -> None:
    turn = asyncio.Lock()
    held: list[bool] = []

    async def run(batch: list[int]) -> Callable[[], None]:
        return lambda: held.append(turn.locked())

    batcher: Batcher[int] = Batcher(run, lambda item, error: None, turn=turn)
    batcher.submit(1)
    await batcher.join()
    assert held == [False]


@pytest.mark.parametrize("when", ["run", "afterwards"])
async def test_one_bad_batch_does_not_end_the_lane(when: str) -> None:
    failed: list[int] = []
    done: list[int] = []

    async def run(batch: list[int]) -> Callable[[], None]:
        await asyncio.sleep(0)

        def afterwards() -> None:
            if 1 in batch:
                raise ValueError("afterwards")
            done.extend(batch)

        if when == "run" and 1 in batch:
            raise ValueError("run")
        return afterwards

    batcher: Batcher[int] = Batcher(run, lambda item, error: failed.append(item), limit=1)
    for number in range(3):
        batcher.submit(number)
    await batcher.join()
    assert (failed, done) == ([1], [0, 2])
