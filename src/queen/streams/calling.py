"""Calling the functions that users give: plain ones and coroutines, with and without a context."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

UserFunction: TypeAlias = Callable[..., Any]


async def call(function: UserFunction, *arguments: Any) -> Any:
    """Call it, and await what it returns if that is to be awaited."""
    result = function(*arguments)
    return await result if inspect.isawaitable(result) else result


def takes_context(function: UserFunction) -> bool:
    """Whether it can be called with a second argument."""
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


class WithContext:
    """A function that is given the context if it takes one."""

    __slots__ = ("_function", "_wants_context")

    def __init__(self, function: UserFunction, what: str) -> None:
        if not callable(function):
            raise TypeError(f"{what} requires a function, not {function!r}")
        self._function = function
        self._wants_context = takes_context(function)

    async def __call__(self, value: Any, context: Any) -> Any:
        if self._wants_context:
            return await call(self._function, value, context)
        return await call(self._function, value)
