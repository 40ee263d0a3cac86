"""The result backend without a worker: how many requests it makes, which under load is how long a canvas takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult, GroupResult

from queen.celery.link import Link
from tests.celery.queues import Namespace

_HEADER = 300


@pytest.fixture
def app(namespace: Namespace) -> Iterator[Celery]:
    with Celery("backend", broker=namespace.url, backend=namespace.url) as one:
        yield one


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The bodies that are sent from now on."""
    sent: list[Any] = []
    post = Link.post

    def recorded(link: Link, path: str, body: Any, *arguments: Any) -> bytes:
        sent.append(body)
        return post(link, path, body, *arguments)

    monkeypatch.setattr(Link, "post", recorded)
    return sent


def test_the_header_of_a_chord_is_not_read_task_by_task_while_its_body_is_waited_for(
    app: Celery, requests: list[Any]
) -> None:
    header = GroupResult("header", [app.AsyncResult(f"part{number}") for number in range(_HEADER)])
    body = AsyncResult("body", app=app, parent=header)
    with pytest.raises(CeleryTimeoutError):
        body.get(timeout=1)
    # Celery itself reads each once before it waits.
    assert _HEADER < len(requests) < 1.5 * _HEADER


def test_an_error_in_the_header_is_raised_to_the_task_waiting_for_the_body(app: Celery) -> None:
    parts = [app.AsyncResult(f"part{number}") for number in range(_HEADER)]
    body = AsyncResult("body", app=app, parent=GroupResult("header", parts))

    def fail_a_part(*_: Any) -> None:
        app.backend.mark_as_failure("part7", ValueError("burnt"))

    with pytest.raises(ValueError, match="burnt"):
        body.get(timeout=60, on_interval=fail_a_part)


def test_a_part_of_a_chord_is_stored_and_counted_in_one_request(app: Celery, requests: list[Any]) -> None:
    backend = app.backend
    backend.set_chord_size("header", 3)
    request = Context(id="part", group="header", chord={"task": "total", "args": [], "kwargs": {}, "options": {}})
    requests.clear()
    backend.mark_as_done("part", 7, request=request)
    assert len(requests) == 1
    assert app.AsyncResult("part").get(timeout=60) == 7
    done = backend.get_key_for_group("header", ".done")
    assert backend.get(done) == 1

    # A second run counts no second part, and its result is stored nevertheless.
    backend.mark_as_done("part", 8, request=request)
    assert backend.get(done) == 1
    app.backend._cache.clear()
    assert app.AsyncResult("part").get(timeout=60) == 8


def test_a_result_that_is_too_large_says_so(app: Celery) -> None:
    with pytest.raises(ValueError, match="the result of a task may have 1048576 bytes with its meta data, not 20001"):
        app.backend.mark_as_done("large", "x" * 2_000_000)


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_an_error_of_any_size_is_stored_as_far_as_a_key_takes_it(app: Celery, serializer: str) -> None:
    app.conf.update(result_serializer=serializer, result_accept_content=["json", "pickle"], result_extended=True)
    request = Context(id="large", args=["y" * 2_000_000], kwargs={}, delivery_info=None)
    error = KeyError("x" * 2_000_000, 7)
    app.backend.mark_as_failure("large", error, traceback="first\n" + "last\n" * 400_000, request=request)
    result = app.AsyncResult("large")
    with pytest.raises(KeyError if serializer == "json" else RuntimeError, match="xxxxx"):
        result.get(timeout=60)
    assert result.state == "FAILURE"
    assert result.traceback.endswith("last\n") and len(result.traceback) < 100_000
