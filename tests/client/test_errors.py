"""The tree of errors, and what each of them is raised for."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import queen as front_door
from queen import (
    AuthError,
    BadRequestError,
    ConflictError,
    NotFoundError,
    OverloadedError,
    Queen,
    QueenConnectionError,
    QueenError,
    QueenTimeoutError,
    RequestError,
    ServerError,
    TransactionError,
)
from queen.client import errors


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[tuple[str, list[float]]]:
    """A server that gives these answers to requests, one after the other, and the times they came at."""
    left = list(answers)
    times: list[float] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            while (await reader.readline()).strip():
                pass
            times.append(time.monotonic())
            writer.write(left.pop(0))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", times
    finally:
        server.close()


def answer(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Content-Type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    assert errors.__doc__ is not None
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        name = next((word for word in line.split() if word.endswith("Error")), None)
        if name is None or not line.startswith((name, "├", "│", "└")):
            continue
        depth = line.index(name) // 4
        path[depth:] = [name]
        if depth:
            drawn[name] = path[depth - 1]
    kinds = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, QueenError) and kind is not QueenError
    }
    assert drawn == {name: kind.__bases__[0].__name__ for name, kind in kinds.items()}
    assert all(getattr(front_door, name) is kind for name, kind in kinds.items())


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("400 Bad Request", BadRequestError),
        ("401 Unauthorized", AuthError),
        ("403 Forbidden", AuthError),
        ("404 Not Found", NotFoundError),
        ("409 Conflict", ConflictError),
        ("413 Content Too Large", BadRequestError),
        ("429 Too Many Requests", OverloadedError),
        ("500 Internal Server Error", ServerError),
        ("503 Service Unavailable", OverloadedError),
    ],
)
async def test_each_status_has_its_error(status: str, kind: type[RequestError]) -> None:
    async with (
        answering(answer(status, b'{"error": "what was wrong"}')) as (url, _),
        Queen(url, retry_attempts=1) as queen,
    ):
        with pytest.raises(RequestError) as caught:
            await queen.request("GET", "/api/v1/x")
    error = caught.value
    assert type(error) is kind
    assert str(error) == "what was wrong"
    assert (error.method, error.url, error.status) == ("GET", f"{url}/api/v1/x", int(status[:3]))
    assert error.__notes__ == [f"GET {url}/api/v1/x -> {status[:3]}"]


async def test_answer_without_an_error_text_is_described_by_its_status() -> None:
    async with answering(answer("502 Bad Gateway", b"<html>")) as (url, _), Queen(url, retry_attempts=1) as queen:
        with pytest.raises(ServerError, match="HTTP 502: Bad Gateway"):
            await queen.request("GET", "/")


async def test_overloaded_server_is_asked_again_when_it_said() -> None:
    busy = answer("503 Service Unavailable", b'{"error": "busy"}', "Retry-After: 1")
    async with (
        answering(busy, answer("200 OK", b'{"well": true}')) as (url, times),
        Queen(url, retry_delay_millis=1) as queen,
    ):
        assert await queen.request("GET", "/") == {"well": True}
    assert times[1] - times[0] >= 0.99


async def test_overloaded_server_that_stays_so_is_an_error_with_its_time() -> None:
    busy = answer("429 Too Many Requests", b'{"error": "busy"}', "Retry-After: 7")
    async with answering(busy) as (url, _), Queen(url, retry_attempts=1) as queen:
        with pytest.raises(OverloadedError) as caught:
            await queen.request("GET", "/")
    assert caught.value.retry_after == 7


async def test_bad_request_is_not_tried_again() -> None:
    async with (
        answering(answer("400 Bad Request"), answer("200 OK")) as (url, times),
        Queen(url, retry_delay_millis=1) as queen,
    ):
        with pytest.raises(BadRequestError):
            await queen.request("GET", "/")
    assert len(times) == 1


async def test_server_that_does_not_answer_is_a_timeout() -> None:
    async with answering(b"") as (url, _), Queen(url, retry_attempts=1, timeout_millis=50) as queen:
        with pytest.raises(QueenTimeoutError, match=r"timed out after 0\.05 s"):
            await queen.request("GET", "/")


async def test_answer_of_something_else_is_not_taken_for_messages() -> None:
    async with answering(answer("200 OK", b"<html>")) as (url, _), Queen(url, strict=True) as queen:
        with pytest.raises(ServerError, match="not from a Queen server"):
            await queen.queue("q").pop()


async def test_refused_transaction_raises_and_applies_nothing(queen: Queen) -> None:
    await queen.queue("q").push({"data": 1})
    [message] = await queen.queue("q").pop()
    unknown = {**message, "transactionId": "nobody"}
    with pytest.raises(TransactionError, match="Message not found"):
        await queen.transaction().queue("other").push({"data": 1}).ack(unknown).commit()
    with pytest.raises(TransactionError, match="no operations"):
        await queen.transaction().commit()
    assert await queen.queue("other").wait(False).pop() == []


async def test_no_server_is_a_connection_error() -> None:
    async with Queen("http://127.0.0.1:1", retry_attempts=2, retry_delay_millis=1) as queen:
        with pytest.raises(QueenConnectionError) as caught:
            await queen.queue("q").push({"data": 1})
        assert caught.value.url == "http://127.0.0.1:1/api/v1/push"
        # As programs for the published client expect it.
        assert await queen.queue("q").pop() == []
        assert await queen.queue("q").dlq().get() == {"messages": [], "total": 0}
        answered = await queen.ack({"transactionId": "t", "partitionId": "p"})
        assert answered["success"] is False and "connection failed" in str(answered["error"])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, "needs a URL"),
        ({"urls": []}, "needs a URL"),
        ("localhost:6632", "must start with http"),
        ({"url": "http://a", "retry_attempts": 0}, "retry_attempts must be a number of at least 1"),
        ({"url": "http://a", "load_balancing_strategy": "luck"}, "one of affinity, round-robin, session"),
    ],
)
def test_client_that_cannot_work_is_not_made(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Queen(given)


def test_unknown_option_is_reported() -> None:
    with pytest.warns(UserWarning, match="no option timeout_milis"):
        Queen({"url": "http://a", "timeout_milis": 3})


async def test_context_in_the_place_of_the_status_is_refused(queen: Queen) -> None:
    await queen.queue("tasks").push({"data": 1})
    message = await queen.queue("tasks").group("workers").pop()
    with pytest.raises(TypeError, match="after its status"):
        await queen.ack(message, {"group": "workers"})  # type: ignore[arg-type]
