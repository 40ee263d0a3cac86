"""Answers: their listener hears of them at once, and only once."""

from __future__ import annotations

import asyncio
import logging

import pytest

from queen.concurrency import EagerFuture


def listen(answer: EagerFuture[int]) -> list[asyncio.Future[int]]:
    heard: list[asyncio.Future[int]] = []
    answer.listener = heard.append
    return heard


async def test_the_listener_is_called_before_the_loop_goes_on() -> None:
    answer: EagerFuture[int] = EagerFuture()
    heard = listen(answer)
    answer.set_result(1)
    assert heard == [answer] and answer.result() == 1


async def test_so_are_an_error_and_a_cancellation() -> None:
    failed: EagerFuture[int] = EagerFuture()
    heard = listen(failed)
    failed.set_exception(ValueError("no"))
    assert heard == [failed] and isinstance(failed.exception(), ValueError)

    cancelled: EagerFuture[int] = EagerFuture()
    heard = listen(cancelled)
    assert cancelled.cancel()
    assert not cancelled.cancel(), "it has ended"
    assert heard == [cancelled] and cancelled.cancelled()


async def test_awaiting_it_gives_the_result_like_any_future() -> None:
    answer: EagerFuture[int] = EagerFuture()
    asyncio.get_running_loop().call_soon(answer.set_result, 2)
    assert await answer == 2


async def test_a_listener_that_fails_does_not_bother_the_giver(caplog: pytest.LogCaptureFixture) -> None:
    def fail(answer: EagerFuture[int]) -> None:
        raise RuntimeError("the wire is cut")

    answer: EagerFuture[int] = EagerFuture()
    answer.listener = fail
    with caplog.at_level(logging.ERROR):
        answer.set_result(3)
    assert await answer == 3
    assert "listener of a future failed" in caplog.text
