"""Answers found once for all who ask."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from queen.errors import BadRequest
from queen.http.routing.view_cache import FileClaim, HostViewCache, cached
from queen.http.server.message import Request, Response
from queen.single_flight import Cached, SharedResult, SingleFlightCache, cache_seconds
from tests.support.ageing import until


class View:
    """Takes a given time, and counts how often it was called."""

    def __init__(self) -> None:
        self.asked = 0
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.seconds = 0.0
        self.now = 1000.0
        self.fails = False

    def clock(self) -> float:
        return self.now

    async def find(self, request: Request) -> Response:
        self.asked += 1
        self.begun.set()
        await self.go_on.wait()
        self.now += self.seconds
        if self.fails or "bad" in request.query:
            raise BadRequest("no")
        return Response(200, str(self.asked).encode())


def request(path: str = "/status", **query: str) -> Request:
    return Request("GET", path, {}, query, {}, b"")


async def test_concurrent_requests_get_the_same_result() -> None:
    view = View()
    handler = cached(view.find, SingleFlightCache(0))
    asking = [asyncio.ensure_future(handler(request())) for _ in range(5)]
    other = asyncio.ensure_future(handler(request(queue="other")))
    await asyncio.sleep(0)
    view.go_on.set()
    assert len({answer.body for answer in await asyncio.gather(*asking)}) == 1
    await other
    assert view.asked == 2


async def test_a_cancelled_request_does_not_cancel_the_others() -> None:
    view = View()
    handler = cached(view.find, SingleFlightCache(0))
    first, second = (asyncio.ensure_future(handler(request())) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    view.go_on.set()
    assert (await second).body == b"1"


async def test_an_answer_that_took_long_is_given_again_and_one_found_quickly_is_not() -> None:
    view = View()
    view.go_on.set()
    handler = cached(view.find, SingleFlightCache(1.0, clock=view.clock))
    assert [(await handler(request())).body for _ in range(3)] == [b"1", b"2", b"3"]
    view.seconds = 0.03
    assert [(await handler(request())).body for _ in range(3)] == [b"4", b"4", b"4"]
    view.now += 1.0
    assert (await handler(request())).body == b"5"


@pytest.mark.parametrize(("took", "again"), [(0.004, 0.0), (0.006, 0.6), (0.03, 1.0), (0.5, 5.0)])
async def test_the_longer_it_took_the_longer_it_is_given_again(took: float, again: float) -> None:
    assert cache_seconds(took, 1.0) == pytest.approx(again)
    assert cache_seconds(took, 0) == 0


async def test_nothing_is_given_again_when_that_is_not_wanted() -> None:
    view = View()
    view.go_on.set()
    view.seconds = 0.03
    handler = cached(view.find, SingleFlightCache(0, clock=view.clock))
    assert [(await handler(request())).body for _ in range(2)] == [b"1", b"2"]


async def test_one_worker_finds_for_all_of_its_host(tmp_path: Path) -> None:
    view = View()
    view.go_on.set()
    view.seconds = 0.03
    first, second = (cached(view.find, SingleFlightCache(1.0, HostViewCache(tmp_path), view.clock)) for _ in range(2))
    # Each has to find it once to know that it takes long.
    assert [(await handler(request())).body for handler in (first, second)] == [b"1", b"2"]
    view.now += 1.0
    assert [(await handler(request())).body for handler in (first, second)] == [b"3", b"3"]
    view.now += 1.0
    view.go_on.clear()
    view.begun.clear()
    asking = [asyncio.ensure_future(handler(request())) for handler in (second, first)]
    await asyncio.wait_for(view.begun.wait(), 100)
    view.go_on.set()
    assert [answer.body for answer in await asyncio.gather(*asking)] == [b"4", b"4"]


async def test_a_worker_finds_itself_what_another_failed_to_find(tmp_path: Path) -> None:
    view = View()
    view.go_on.set()
    view.seconds = 0.03
    first, second = (cached(view.find, SingleFlightCache(1.0, HostViewCache(tmp_path), view.clock)) for _ in range(2))
    for handler in (first, second):
        await handler(request())
    view.now += 1.0
    view.fails = True
    with pytest.raises(BadRequest):
        await first(request())
    view.fails = False
    answer = await second(request())
    assert (answer.status, answer.body, answer.headers) == (200, b"4", ())


def test_an_unreadable_result_is_computed_again(tmp_path: Path) -> None:
    answers = HostViewCache(tmp_path)
    claim = answers.look("/status", 1.0)
    assert isinstance(claim, FileClaim)
    answers.put("/status", 5.0, Response(200, b"found", headers=((b"A", b"b"),)))
    assert answers.look("/other", 1.0) is not None
    claim.end()
    found = answers.look("/status", 1.0)
    assert isinstance(found, Cached) and found.value.headers == ((b"A", b"b"),)
    for path in tmp_path.glob("answer-*"):
        if not path.suffix:
            path.write_bytes(b"torn")
    assert isinstance(answers.look("/status", 1.0), FileClaim)


def shared(view: View, most_seconds: float = 1.0) -> SharedResult[bytes]:
    async def look() -> bytes:
        return (await view.find(request())).body

    return SharedResult(look, most_seconds, clock=view.clock)


async def test_concurrent_requests_for_a_key_share_one_computation() -> None:
    view = View()
    view.seconds = 0.03
    standings = shared(view)
    asking = [asyncio.ensure_future(standings.get()) for _ in range(3)]
    await asyncio.sleep(0)
    asking[0].cancel()
    view.go_on.set()
    assert [await one for one in asking[1:]] == [b"1", b"1"]
    # The first result took what a start takes: it is not kept.
    assert await standings.get() == b"2"
    assert await standings.get() == b"2"
    # A view of one second that asks again is not counted for each time.
    view.now += 1.1
    assert await standings.get() == b"2"
    view.now += 1.4
    assert await standings.get() == b"3"
    view.now += 2.5
    view.fails = True
    with pytest.raises(BadRequest):
        await standings.get()
    view.fails = False
    assert await standings.get() == b"5"


async def test_a_slow_result_is_served_stale_while_it_is_computed_again() -> None:
    view = View()
    view.seconds = 2.0
    view.go_on.set()
    standings = shared(view)
    assert await standings.get() == b"1"
    view.now += 30.0
    view.go_on.clear()
    view.begun.clear()
    # It has expired and the next takes its time; meanwhile there is the one before.
    assert [await standings.get() for _ in range(3)] == [b"1"] * 3
    await view.begun.wait()
    assert (view.asked, standings.last) == (2, b"1")
    view.go_on.set()
    await until(lambda: standings.last == b"2")
    assert await standings.get() == b"2"
    # After a night nobody wants the one of yesterday.
    view.now += 3600.0
    assert await standings.get() == b"3"


async def test_failure_in_the_background_is_raised_to_the_next_request() -> None:
    view = View()
    view.seconds = 2.0
    view.go_on.set()
    standings = shared(view)
    await standings.get()
    view.now += 30.0
    view.fails = True
    assert await standings.get() == b"1"
    await until(lambda: standings.last is None)
    with pytest.raises(BadRequest):
        await standings.get()


async def test_without_a_cache_every_request_waits_for_a_current_result() -> None:
    view = View()
    view.seconds = 2.0
    view.go_on.set()
    standings = shared(view, most_seconds=0)
    assert [await standings.get() for _ in range(3)] == [b"1", b"2", b"3"]
    assert standings.last is None


async def test_slow_result_is_computed_ahead_of_requests() -> None:
    view = View()
    view.seconds = 2.0
    view.go_on.set()
    standings = shared(view)
    task = asyncio.create_task(standings.keep_warm())
    await until(lambda: standings.last is not None)
    task.cancel()
    assert (await standings.get(), view.asked) == (b"1", 1)


async def test_a_failure_is_raised_to_all_waiting_requests_and_not_cached() -> None:
    view = View()
    handler = cached(view.find, SingleFlightCache(1.0))
    asking = [asyncio.ensure_future(handler(request(bad="1"))) for _ in range(2)]
    await asyncio.sleep(0)
    view.go_on.set()
    for one in asking:
        with pytest.raises(BadRequest):
            await one
    with pytest.raises(BadRequest):
        await handler(request(bad="1"))
    assert view.asked == 2


async def test_unused_results_are_dropped() -> None:
    view = View()
    view.go_on.set()
    shared: SingleFlightCache[Response] = SingleFlightCache(1.0)
    handler = cached(view.find, shared)
    for number in range(300):
        await handler(request(queue=str(number)))
    assert len(shared) <= 101


async def test_what_many_ask_for_is_given_again_for_a_moment_however_quickly_it_is_found() -> None:
    view = View()
    view.go_on.set()
    handler = cached(view.find, SingleFlightCache(2, clock=view.clock))
    for expected in (1, 2, 3, 4):
        assert (await handler(request())).body == str(expected).encode(), "few ask: found anew"
        view.now += 0.2
    for _ in range(5):
        assert (await handler(request())).body == b"5"
        view.now += 0.1
    view.now += 0.5
    assert (await handler(request())).body == b"6"
    view.now += 3.0
    bodies = []
    for _ in range(3):
        bodies.append((await handler(request())).body)
        view.now += 0.3
    assert bodies == [b"7", b"8", b"9"], "nobody asks often any more"


async def test_one_worker_finds_for_all_of_its_host_what_many_ask_for(tmp_path: Path) -> None:
    view = View()
    view.go_on.set()
    first, second = (cached(view.find, SingleFlightCache(2.0, HostViewCache(tmp_path), view.clock)) for _ in range(2))
    for _ in range(5):
        for handler in (first, second):
            await handler(request())
    asked = view.asked
    for _ in range(3):
        view.now += 1.0
        assert len({(await handler(request())).body for handler in (first, second) for _ in range(5)}) == 1
    assert view.asked == asked + 3


async def test_without_a_time_nothing_is_given_again_however_often_it_is_asked_for() -> None:
    view = View()
    view.go_on.set()
    handler = cached(view.find, SingleFlightCache(0, clock=view.clock))
    assert [(await handler(request())).body for _ in range(8)] == [str(n).encode() for n in range(1, 9)]
