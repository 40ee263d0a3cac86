"""A future that tells who asked at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class Answer(asyncio.Future[T]):
    """Like any future, but `listener` hears of its end in the midst of whoever ends it, before the loop goes on.

    A listener must do nothing but pass the answer on: to make it find the world in order is not the giver's duty.
    """

    listener: Callable[[Answer[T]], None] | None = None

    def set_result(self, result: T, /) -> None:
        super().set_result(result)
        self._tell()

    def set_exception(self, exception: type[BaseException] | BaseException, /) -> None:
        super().set_exception(exception)
        self._tell()

    def cancel(self, msg: object | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self._tell()
        return cancelled

    def _tell(self) -> None:
        listener, self.listener = self.listener, None
        if listener is None:
            return
        try:
            listener(self)
        except Exception:
            # The giver has others to answer.
            log.exception("an answer could not be passed on")
