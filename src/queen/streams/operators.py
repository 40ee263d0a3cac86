"""Operators: map, filter, flat_map, key_by, reduce, aggregate, and the sinks to and foreach."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

from queen.streams.records import Context, Emit, queue_name_of

UserFunction: TypeAlias = Callable[..., Any]


async def call(function: UserFunction, *arguments: Any) -> Any:
    """Call a function and await its result if it is awaitable."""
    result = function(*arguments)
    return await result if inspect.isawaitable(result) else result


def takes_context(function: UserFunction) -> bool:
    """Whether a function accepts a second argument."""
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


class WithContext:
    """A user function, called with the context if it accepts one."""

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


class Operator:
    """One operator of a chain: its kind, and the configuration that state depends on."""

    kind: ClassVar[str]

    @property
    def config(self) -> dict[str, Any]:
        return {}


class Stateless(Operator):
    """A stateless operator: any number of output values per input."""

    def __init__(self, function: UserFunction) -> None:
        self._call = WithContext(function, f".{self.kind}()")

    async def values(self, argument: Any, current: Any, context: Context | None) -> list[Any]:
        """`argument` is passed to the function, `current` is the value so far."""
        raise NotImplementedError


class Map(Stateless):
    kind = "map"

    async def values(self, argument: Any, current: Any, context: Context | None) -> list[Any]:
        return [await self._call(argument, context)]


class Filter(Stateless):
    kind = "filter"

    async def values(self, argument: Any, current: Any, context: Context | None) -> list[Any]:
        return [current] if await self._call(argument, context) else []


class FlatMap(Stateless):
    kind = "flatMap"

    async def values(self, argument: Any, current: Any, context: Context | None) -> list[Any]:
        made = await self._call(argument, context)
        if not isinstance(made, list):
            raise TypeError(f"the function of .flat_map() must return a list, not {type(made).__name__}")
        return made


class KeyBy(Operator):
    kind = "keyBy"

    def __init__(self, function: UserFunction) -> None:
        if not callable(function):
            raise TypeError(f".key_by() requires a function, not {function!r}")
        self._function = function

    async def key(self, message: Any) -> str:
        return str(await call(self._function, message))


class Sink(Operator):
    """Pushes to a queue, in the same transaction as the state and the ack: exactly once."""

    kind = "sink"

    def __init__(self, queue: Any, partition: str | UserFunction | None = None) -> None:
        self.queue = queue_name_of(queue)
        self._partition = partition

    @property
    def config(self) -> dict[str, Any]:
        return {"kind": "sink", "queue": self.queue}

    def push_items(self, emits: Iterable[Emit], source_partition: str) -> list[dict[str, Any]]:
        return [
            {
                "queue": self.queue,
                "partition": self._partition_of(emit.value, source_partition),
                "payload": emit.value if isinstance(emit.value, Mapping) else {"value": emit.value},
            }
            for emit in emits
        ]

    def _partition_of(self, value: Any, source_partition: str) -> str:
        if callable(self._partition):
            return str(self._partition(value))
        return self._partition or source_partition or "Default"


class Foreach(Operator):
    """Calls a function for each value before the cycle is committed: at least once."""

    kind = "foreach"

    def __init__(self, function: UserFunction) -> None:
        self._call = WithContext(function, ".foreach()")

    @property
    def config(self) -> dict[str, Any]:
        return {"kind": "foreach"}

    async def run(self, emits: Iterable[Emit], partition: str, partition_id: str) -> None:
        for emit in emits:
            await self._call(emit.value, emit.context(partition, partition_id))


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
        """The initial accumulator of a window; a copy, because the function may change it in place."""
        return copy.deepcopy(self._initial)

    async def add(self, accumulator: Any, value: Any) -> Any:
        return await call(self._function, accumulator, value)


class Aggregate(Reduce):
    """Several named aggregates: count, sum, min, max and avg; any other name is a sum."""

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
    """Add the result of an extractor; None if it is not a number."""
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
