"""Heads that were read before are recognised, and mean the same as when they were parsed."""

from __future__ import annotations

import pytest

from queen.http.server.message import Access, Request, Response
from queen.http.server.reader import CACHED_HEADS, SLICE_BYTES, HeadCache, KnownHead, RequestReader
from queen.http.server.router import Router


def answer(request: Request) -> Response:
    return Response(200)


def reader(heads: HeadCache) -> RequestReader:
    router = Router()
    router.add("GET", "/things/{name}", answer, Access.PUBLIC)
    router.add("POST", "/things", answer, Access.PUBLIC)
    return RequestReader(router, 65536, 2**20, "test", heads)


def post(body: bytes, *lines: bytes) -> bytes:
    head = b"\r\n".join((b"POST /things?x=1 HTTP/1.1", b"Host: a", *lines, b"Content-Length: %d" % len(body)))
    return head + b"\r\n\r\n" + body


def test_a_repeated_request_is_read_like_the_first() -> None:
    reading = reader(HeadCache())
    for body in (b"first", b"other", b"third"):
        reading.feed(post(body, b"Connection: keep-alive"))
        request, _, connection_line, upgrade = reading.take()
        assert (request.method, request.path, dict(request.query)) == ("POST", "/things", {"x": "1"})
        assert request.headers[b"host"] == b"a"
        assert (request.body, connection_line, upgrade) == (body, b"", None)


def test_a_head_that_is_known_is_shared_by_connections() -> None:
    heads = HeadCache()
    for _ in range(2):
        reading = reader(heads)
        reading.feed(b"GET /things/a%20b HTTP/1.1\r\nHost: a\r\n\r\n")
        assert reading.take()[0].params == {"name": "a b"}


def test_a_known_head_whose_body_is_still_to_come_waits_for_it() -> None:
    reading = reader(HeadCache())
    reading.feed(post(b"12345"))
    reading.take()
    whole = post(b"abcde")
    reading.feed(whole[:-2])
    assert not reading.pending
    assert reading.receiving
    reading.feed(whole[-2:])
    assert reading.take()[0].body == b"abcde"


def test_requests_behind_a_known_head_are_all_read() -> None:
    reading = reader(HeadCache())
    reading.feed(post(b"12345"))
    reading.take()
    reading.feed(post(b"abcde") + post(b"fghij") + post(b"k"))
    assert [reading.take()[0].body for _ in range(3)] == [b"abcde", b"fghij", b"k"]


def test_a_large_body_that_comes_with_its_head_is_read_like_a_small_one_and_checked_once_it_is_served() -> None:
    heads = HeadCache()
    checked: list[Request] = []
    for body in (b"a" * (3 * SLICE_BYTES), b"b" * (3 * SLICE_BYTES)):
        reading = reader(heads)
        reading.check_head = checked.append
        reading.feed(post(body))
        assert reading.take()[0].body == body
        assert not reading.receiving
    assert heads.get(post(body).removesuffix(body)) is not None
    assert not checked


def test_a_large_body_whose_end_is_still_to_come_is_checked_by_its_head() -> None:
    reading = reader(HeadCache())
    checked: list[Request] = []
    reading.check_head = checked.append
    whole = post(b"a" * (3 * SLICE_BYTES))
    reading.feed(whole[:-1])
    assert [request.path for request in checked] == ["/things"]
    reading.feed(whole[-1:])
    assert len(reading.take()[0].body) == 3 * SLICE_BYTES
    assert len(checked) == 1


def test_large_requests_behind_a_known_head_are_all_read() -> None:
    reading = reader(HeadCache())
    bodies = [letter * (2 * SLICE_BYTES) for letter in (b"a", b"b", b"c")]
    reading.feed(post(bodies[0]))
    reading.take()
    reading.feed(b"".join(map(post, bodies)))
    assert [reading.take()[0].body for _ in bodies] == bodies


@pytest.mark.parametrize(
    "line", [b"Connection: close", b"Expect: 100-continue", b"Transfer-Encoding: chunked", b"Upgrade: h2c"]
)
def test_a_head_that_asks_for_more_than_an_answer_is_parsed_every_time(line: bytes) -> None:
    heads = HeadCache()
    body = b"0\r\n\r\n" if line.startswith(b"Transfer") else b""
    data = b"POST /things HTTP/1.1\r\nHost: a\r\n" + line + b"\r\n\r\n" + body
    for _ in range(2):
        reading = reader(heads)
        reading.feed(data)
    assert heads.get(data.removesuffix(body) if body else data) is None


def test_heads_of_unknown_paths_are_not_kept() -> None:
    heads = HeadCache()
    data = b"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n"
    reader(heads).feed(data)
    assert heads.get(data) is None


def test_the_number_of_heads_is_bounded() -> None:
    heads, router = HeadCache(), Router()
    known = KnownHead(router.match(b"GET", b"/"), {}, 0)
    for number in range(CACHED_HEADS * 4):
        heads.put(b"%d" % number, known)
    kept = [number for number in range(CACHED_HEADS * 4) if heads.get(b"%d" % number) is not None]
    assert CACHED_HEADS <= len(kept) <= CACHED_HEADS * 2
