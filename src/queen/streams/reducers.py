"""The operators that make one value of all in a window: reduce and aggregate."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from queen.streams.calling import UserFunction, call
from queen.streams.operators import Operator


class Reduce(Operator):
    """`function(accumulator, value)` for every value, from `initial` on."""

    kind = "reduce"

    def __init__(self, function: UserFunction, initial: Any = None) -> None:
        if not callable(function):
            raise TypeError(f".reduce() requires a function, not {function!r}")
        self._function = function
        self._initial = initial

    @property
    def config(self) -> dict[str, Any]:
        return {"hasInitial": self._initial is not None}

    def initial(self) -> Any:
        """What a window begins with; its own, because the function may change it in place."""
        return copy.deepcopy(self._initial)

    async def add(self, accumulator: Any, value: Any) -> Any:
        return await call(self._function, accumulator, value)


class Aggregate(Reduce):
    """Several named numbers at once: count, sum, min, max and avg mean what they say, any other name is a sum."""

    kind = "aggregate"

    def __init__(self, extractors: Mapping[str, UserFunction]) -> None:
        if not isinstance(extractors, Mapping):
            raise TypeError(f".aggregate() requires named functions, not {extractors!r}")
        if not extractors:
            raise ValueError(".aggregate() requires at least one named function")
        for name, function in extractors.items():
            if not callable(function):
                raise TypeError(f".aggregate(): {name} must be a function, not {function!r}")
        self._extractors = dict(extractors)
        super().__init__(self._add, _zeroes(self._extractors))

    @property
    def config(self) -> dict[str, Any]:
        return {"fields": list(self._extractors)}

    async def _add(self, accumulator: Any, value: Any) -> dict[str, Any]:
        totals = dict(accumulator) if isinstance(accumulator, Mapping) else {}
        for name, function in self._extractors.items():
            number = await call(function, value)
            _add_one(totals, name, number if _is_number(number) else None)
        return totals


def _zeroes(names: Mapping[str, Any]) -> dict[str, Any]:
    zeroes: dict[str, Any] = {}
    for name in names:
        if name == "avg":
            zeroes |= {"__avg_sum": 0, "__avg_count": 0}
        zeroes[name] = None if name in ("min", "max") else 0
    return zeroes


def _add_one(totals: dict[str, Any], name: str, number: float | None) -> None:
    """Add what an extractor returned; None when that was no number."""
    if name == "count":
        totals["count"] = totals.get("count", 0) + (1 if number is None else number)
    elif number is None:
        return
    elif name == "min":
        totals["min"] = number if totals.get("min") is None else min(totals["min"], number)
    elif name == "max":
        totals["max"] = number if totals.get("max") is None else max(totals["max"], number)
    elif name == "avg":
        totals["__avg_sum"] = totals.get("__avg_sum", 0) + number
        totals["__avg_count"] = totals.get("__avg_count", 0) + 1
        totals["avg"] = totals["__avg_sum"] / totals["__avg_count"]
    else:
        totals[name] = totals.get(name, 0) + number


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
