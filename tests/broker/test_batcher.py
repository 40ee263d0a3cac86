"""Group commit: what goes together, what is done while a batch waits for its lock, and who fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import asyncpg
import pytest

from queen.broker.batcher import Batcher, SmallFirst
from queen.errors import DatabaseUnavailable, Overloaded, QueenError


@dataclass(eq=False)
class Asked:
    """A request that is a number."""

    number: int
    answer: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Stage:
    """Batches numbers, and remembers what it was asked to do, in order."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self.events: list[tuple[str, tuple[int, ...]]] = []
        self.batcher: Batcher[Asked] = Batcher(
            self._run,
            limit=100,
            lock=lock,
            meanwhile=lambda waiting: self.events.append(("ahead", numbers(waiting))),
        )

    async def _run(self, batch: list[Asked]) -> Callable[[], None]:
        self.events.append(("run", numbers(batch)))
        await asyncio.sleep(0)
        return lambda: self.events.append(("answered", numbers(batch)))


def numbers(batch: Sequence[Asked]) -> tuple[int, ...]:
    return tuple(asked.number for asked in batch)


async def test_what_waits_for_its_lock_is_made_ready_meanwhile() -> None:
    lock = asyncio.Lock()
    stage = Stage(lock)
    async with lock:
        stage.batcher.submit(Asked(1))
        await asyncio.sleep(0)
        # This one comes just in time, the third is late.
        stage.batcher.submit(Asked(2))
        await asyncio.sleep(0.01)
        stage.batcher.submit(Asked(3))
        await asyncio.sleep(0.01)
        assert stage.events == [("ahead", (1, 2))]
    await stage.batcher.join()
    assert stage.events[1:] == [("run", (1, 2, 3)), ("answered", (1, 2, 3))]


async def test_a_batch_that_need_not_wait_prepares_nothing() -> None:
    stage = Stage(asyncio.Lock())
    stage.batcher.submit(Asked(1))
    await stage.batcher.join()
    assert stage.events == [("run", (1,)), ("answered", (1,))]


async def test_more_than_a_batch_holds_is_not_made_ready() -> None:
    lock = asyncio.Lock()
    stage = Stage(lock)
    async with lock:
        for number in range(101):
            stage.batcher.submit(Asked(number))
        await asyncio.sleep(0.01)
        assert not stage.events
    await stage.batcher.join()
    assert [len(items) for what, items in stage.events if what == "run"] == [100, 1]


async def test_an_answer_comes_when_the_lock_has_been_passed_on() -> None:
    lock = asyncio.Lock()
    held: list[bool] = []

    async def run(batch: list[Asked]) -> Callable[[], None]:
        return lambda: held.append(lock.locked())

    batcher: Batcher[Asked] = Batcher(run, lock=lock)
    batcher.submit(Asked(1))
    await batcher.join()
    assert held == [False]


async def test_a_request_that_is_wrong_fails_alone_and_those_that_were_answered_do_not_run_again() -> None:
    runs: list[tuple[int, ...]] = []

    async def run(batch: list[Asked]) -> Callable[[], None]:
        runs.append(numbers(batch))
        if 0 in numbers(batch):
            batch[0].answer.set_result("at once")
        if 2 in numbers(batch):
            raise asyncpg.DataError("two")

        def answer() -> None:
            for one in batch:
                one.answer.set_result("in the end")

        return answer

    batcher: Batcher[Asked] = Batcher(run)
    asked = [Asked(number) for number in range(4)]
    for one in asked:
        batcher.submit(one)
    await batcher.join()
    assert runs == [(0, 1, 2, 3), (1,), (2,), (3,)]
    assert [one.answer.result() for one in asked if one.number != 2] == ["at once", "in the end", "in the end"]
    assert isinstance(asked[2].answer.exception(), asyncpg.DataError)


@pytest.mark.parametrize("error", [DatabaseUnavailable("gone"), Overloaded("busy")])
async def test_when_postgresql_cannot_do_it_no_request_runs_alone(error: QueenError) -> None:
    runs: list[tuple[int, ...]] = []

    async def run(batch: list[Asked]) -> None:
        runs.append(numbers(batch))
        raise error

    batcher: Batcher[Asked] = Batcher(run)
    asked = [Asked(number) for number in range(3)]
    for one in asked:
        batcher.submit(one)
    await batcher.join()
    assert runs == [(0, 1, 2)]
    assert [one.answer.exception() for one in asked] == [error] * 3


async def test_too_much_that_waits_is_refused() -> None:
    batcher: Batcher[Asked] = Batcher(nothing, weigh=lambda asked: asked.number, most=10)
    batcher.submit(Asked(100))
    with pytest.raises(Overloaded):
        batcher.submit(Asked(1))
    await batcher.join()
    batcher.submit(Asked(1))
    await batcher.join()


async def nothing(batch: list[Asked]) -> None:
    return


@pytest.mark.parametrize("when", ["run", "afterwards"])
async def test_one_bad_batch_does_not_end_the_batcher(when: str) -> None:
    done: list[int] = []

    async def run(batch: list[Asked]) -> Callable[[], None]:
        await asyncio.sleep(0)

        def afterwards() -> None:
            if 1 in numbers(batch):
                raise ValueError("afterwards")
            done.extend(numbers(batch))

        if when == "run" and 1 in numbers(batch):
            raise ValueError("run")
        return afterwards

    batcher: Batcher[Asked] = Batcher(run, limit=1)
    asked = [Asked(number) for number in range(3)]
    for one in asked:
        batcher.submit(one)
    await batcher.join()
    assert done == [0, 2]
    assert str(asked[1].answer.exception()) == when


def test_small_items_pass_large_ones_which_come_one_at_a_time() -> None:
    backlog = SmallFirst[int](weigh=lambda item: item, limit=100, small=10)
    for weight in (60, 61, 62, 1, 2, 63):
        backlog.add(weight, weight)
    assert len(backlog) == 6
    assert backlog.take(0) == ([1, 2, 60], 63)
    assert backlog.take(0) == ([61, 62], 123)
    backlog.add(3, 3)
    assert backlog.waiting() == (3, 63)
    assert backlog.take(0) == ([3, 63], 66)
    assert not backlog.waits(0)
    for _ in range(60):
        backlog.add(5, 5)
    backlog.add(70, 70)
    assert backlog.take(0) == ([*[5] * 20, 70], 170)
    assert backlog.take(0) == ([5] * 20, 100)
