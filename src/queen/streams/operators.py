"""The operators that keep no state: map, filter, flat_map, key_by, and the two ends, to and foreach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from queen.streams.calling import UserFunction, WithContext, call
from queen.streams.queue_names import queue_name_of
from queen.streams.records import Context, Emit


class Operator:
    """One step of a chain: its kind, and the part of its configuration that its state depends on."""

    kind: ClassVar[str]

    @property
    def config(self) -> dict[str, Any]:
        return {}


class Stateless(Operator):
    """Makes any number of values of one."""

    def __init__(self, function: UserFunction) -> None:
        self._call = WithContext(function, f".{self.kind}()")

    async def values(self, seen: Any, current: Any, context: Context | None) -> list[Any]:
        """`seen` is what the function is given, `current` the value so far."""
        raise NotImplementedError


class Map(Stateless):
    kind = "map"

    async def values(self, seen: Any, current: Any, context: Context | None) -> list[Any]:
        return [await self._call(seen, context)]


class Filter(Stateless):
    kind = "filter"

    async def values(self, seen: Any, current: Any, context: Context | None) -> list[Any]:
        return [current] if await self._call(seen, context) else []


class FlatMap(Stateless):
    kind = "flatMap"

    async def values(self, seen: Any, current: Any, context: Context | None) -> list[Any]:
        made = await self._call(seen, context)
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
