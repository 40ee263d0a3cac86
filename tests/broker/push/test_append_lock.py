"""Workers append one after the other, and none waits for a peer that is done."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from queen.broker.push import append_lock as module
from queen.broker.push.append_lock import AppendLock


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[tuple[AppendLock, AppendLock]]:
    """Two workers that hear each other at the next turn of the event loop."""
    turns: list[AppendLock] = []

    def hint(index: int, *, wants: bool) -> None:
        peer = turns[index]
        asyncio.get_running_loop().call_soon(peer.peer_wants if wants else peer.peer_released)

    for peer in (1, 0):
        turns.append(
            AppendLock(tmp_path, wanted=partial(hint, peer, wants=True), released=partial(hint, peer, wants=False))
        )
    yield turns[0], turns[1]
    for one in turns:
        one.close()


async def test_workers_that_both_have_work_alternate(
    workers: tuple[AppendLock, AppendLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_POLL", 60.0)
    order: list[int] = []
    inside = 0

    async def work(number: int) -> None:
        nonlocal inside
        for _ in range(20):
            async with workers[number]:
                inside += 1
                assert inside == 1
                await asyncio.sleep(0.001)
                order.append(number)
                inside -= 1

    async with asyncio.timeout(100):
        await asyncio.gather(work(0), work(1))
    assert sum(one != other for one, other in itertools.pairwise(order)) > 30


async def test_a_worker_whose_peer_had_its_turn_does_not_wait_for_it(
    workers: tuple[AppendLock, AppendLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_POLL", 60.0)
    first, second = workers
    async with asyncio.timeout(100):
        async with first:
            waiting = asyncio.create_task(_take(second))
            await asyncio.sleep(0.01)
        await waiting
        await _take(first)
        await _take(first)


async def test_a_peer_that_asked_and_died_delays_others_only_briefly(workers: tuple[AppendLock, AppendLock]) -> None:
    first, _ = workers
    first.peer_wants()
    async with asyncio.timeout(100):
        await _take(first)


async def test_without_its_file_no_push_waits_and_the_next_one_tries_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turn = AppendLock(tmp_path / "missing", wanted=lambda: None, released=lambda: None)
    await _take(turn)
    assert "turn.lock cannot be opened (No such file or directory)" in caplog.text
    (tmp_path / "missing").mkdir()
    await _take(turn)
    assert (tmp_path / "missing" / "turn.lock").exists()
    turn.close()


async def _take(turn: AppendLock) -> None:
    async with turn:
        pass
