"""Answers found once for all who ask."""

from __future__ import annotations

import asyncio

import pytest

from queen.errors import BadRequest
from queen.http.message import Request, Response
from queen.http.shared import SharedAnswers


class View:
    """Takes as long as it is told to, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.go_on = asyncio.Event()
        self.seconds = 0.0

    async def find(self, request: Request) -> Response:
        self.asked += 1
        await self.go_on.wait()
        await asyncio.sleep(self.seconds)
        if "bad" in request.query:
            raise BadRequest("no")
        return Response(200, str(self.asked).encode())


def request(path: str = "/status", **query: str) -> Request:
    return Request("GET", path, {}, query, {}, b"")


async def test_those_who_ask_meanwhile_get_the_same_answer() -> None:
    view = View()
    handler = SharedAnswers(0).of(view.find)
    asking = [asyncio.ensure_future(handler(request())) for _ in range(5)]
    other = asyncio.ensure_future(handler(request(queue="other")))
    await asyncio.sleep(0)
    view.go_on.set()
    assert len({answer.body for answer in await asyncio.gather(*asking)}) == 1
    await other
    assert view.asked == 2


async def test_whoever_goes_away_does_not_take_the_answer_from_the_others() -> None:
    view = View()
    handler = SharedAnswers(0).of(view.find)
    first, second = (asyncio.ensure_future(handler(request())) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    view.go_on.set()
    assert (await second).body == b"1"


async def test_an_answer_that_took_long_is_given_again_and_one_found_quickly_is_not() -> None:
    view = View()
    view.go_on.set()
    handler = SharedAnswers(1.0).of(view.find)
    assert [(await handler(request())).body for _ in range(3)] == [b"1", b"2", b"3"]
    view.seconds = 0.03
    assert [(await handler(request())).body for _ in range(3)] == [b"4", b"4", b"4"]


async def test_nothing_is_given_again_when_that_is_not_wanted() -> None:
    view = View()
    view.go_on.set()
    view.seconds = 0.03
    handler = SharedAnswers(0).of(view.find)
    assert [(await handler(request())).body for _ in range(2)] == [b"1", b"2"]


async def test_a_failure_is_told_to_all_and_not_remembered() -> None:
    view = View()
    handler = SharedAnswers(1.0).of(view.find)
    asking = [asyncio.ensure_future(handler(request(bad="1"))) for _ in range(2)]
    await asyncio.sleep(0)
    view.go_on.set()
    for one in asking:
        with pytest.raises(BadRequest):
            await one
    with pytest.raises(BadRequest):
        await handler(request(bad="1"))
    assert view.asked == 2


async def test_answers_nobody_asks_for_any_more_are_let_go() -> None:
    view = View()
    view.go_on.set()
    shared = SharedAnswers(1.0)
    handler = shared.of(view.find)
    for number in range(300):
        await handler(request(queue=str(number)))
    assert len(shared) <= 101
