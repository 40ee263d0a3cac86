"""From what the broker promises to an HTTP answer, without a task in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from queen.http.message import Response

T = TypeVar("T")


def reply(promise: asyncio.Future[T], render: Callable[[T], Response]) -> asyncio.Future[Response]:
    """A future of the answer that `render` makes of the promised value. An error is passed on."""
    answer: asyncio.Future[Response] = promise.get_loop().create_future()

    def settle(done: asyncio.Future[T]) -> None:
        if answer.done():
            return
        if done.cancelled():
            answer.cancel()
            return
        error = done.exception()
        if error is None:
            answer.set_result(render(done.result()))
        else:
            answer.set_exception(error)

    promise.add_done_callback(settle)
    return answer
