"""On which shards the handler of a route runs, and how their answers become one."""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import msgspec

from queen.http.routing.call import Call
from queen.wire.ids import lease_partition, partition_number
from queen.wire.shards import Name

if TYPE_CHECKING:
    from queen.broker.sharding.shard_router import ShardRouter

Invoke: TypeAlias = Callable[[int, Call[Any, Any]], Awaitable[Any]]
"""Runs the handler on the shard of a number."""
Merge: TypeAlias = Callable[[Sequence[Any]], Any]

MOST_ON_A_PAGE: Final = 1000
# What is the same on every shard, or means nothing as a sum.
_NOT_SUMMED: Final = frozenset({"bucket_minutes", "limit", "offset", "stats_age", "worker", "point_count"})


class Placement(Protocol):
    """Runs a call where it belongs. Only used where there are several shards."""

    async def run(self, shards: ShardRouter, invoke: Invoke, call: Call[Any, Any]) -> Any: ...


class _ByName:
    def __init__(self, name: Callable[[Call[Any, Any]], Name]) -> None:
        self._name = name

    async def run(self, shards: ShardRouter, invoke: Invoke, call: Call[Any, Any]) -> Any:
        return await shards.on_shard_of([self._name(call)], lambda shard: invoke(shard, call))


def by_queue(key: str = "queue") -> Placement:
    """On the shard of the queue that the path, the body or the query names at `key`."""
    return _ByName(lambda call: Name.queue(value_of(call, key)))


def by_topic() -> Placement:
    """On the shard of the topic that the query or the body names."""
    return _ByName(lambda call: Name.topic(value_of(call, "namespace"), value_of(call, "topic")))


def by_namespace() -> Placement:
    """On the home shard of the namespace that the body names."""
    return _ByName(lambda call: Name.namespace(value_of(call, "namespace")))


class _ByPartition:
    def __init__(self, partition: Callable[[Call[Any, Any]], int]) -> None:
        self._partition = partition

    async def run(self, shards: ShardRouter, invoke: Invoke, call: Call[Any, Any]) -> Any:
        return await shards.on_shard_of_partition(self._partition(call), lambda shard: invoke(shard, call))


def by_partition(key: str = "partition") -> Placement:
    """On the shard of the partition whose public id the path or the body names at `key`."""
    return _ByPartition(lambda call: partition_number(value_of(call, key)))


def by_lease() -> Placement:
    """On the shard of the partition that the lease id in the path names."""
    return _ByPartition(lambda call: lease_partition(value_of(call, "lease")))


class Everywhere:
    """On every shard. `required`: none of them may fail; else those that are unavailable are left out.

    `by_queue`: on one shard alone where the query names a queue.
    """

    def __init__(self, merge: Merge, *, required: bool = False, by_queue: bool = False) -> None:
        self._merge = merge
        self._required = required
        self._by_queue = by_queue

    async def run(self, shards: ShardRouter, invoke: Invoke, call: Call[Any, Any]) -> Any:
        if self._by_queue and call.query.queue:
            return await shards.on_shard_of([Name.queue(call.query.queue)], lambda shard: invoke(shard, call))
        ask = shards.on_every_shard if self._required else shards.on_available_shards
        return self._merge(await ask(lambda shard: invoke(shard, call)))


class Paged:
    """A page of the lists of every shard, in the order of `key`; of one shard where a queue is named.

    `items` is the field that holds the list; empty where the answer is the list.
    """

    def __init__(
        self,
        items: str,
        key: Callable[[Any], Any],
        *,
        newest_first: bool = True,
        order: Callable[[Any], tuple[Callable[[Any], Any], bool]] | None = None,
    ) -> None:
        """`order` gives the key and whether it descends where the query decides that."""
        self._items = items
        self._order = order if order is not None else lambda query: (key, newest_first)

    async def run(self, shards: ShardRouter, invoke: Invoke, call: Call[Any, Any]) -> Any:
        query = call.query
        if getattr(query, "queue", ""):
            return await shards.on_shard_of([Name.queue(query.queue)], lambda shard: invoke(shard, call))
        if query.limit is None and query.offset is None:
            answers = await shards.on_available_shards(lambda shard: invoke(shard, call))
            return self._with(answers, list(self._merged(answers, query)))
        limit, offset = query.limit or MOST_ON_A_PAGE, query.offset or 0
        answers = await shards.on_available_shards(lambda shard: self._first(invoke, shard, call, offset + limit))
        page = list(islice(self._merged(answers, query), offset, offset + limit))
        merged = self._with(answers, page)
        for field, value in (("limit", limit), ("offset", offset)):
            if hasattr(merged, field):
                setattr(merged, field, value)
            if hasattr(getattr(merged, "pagination", None), field):
                setattr(merged.pagination, field, value)
        return merged

    async def _first(self, invoke: Invoke, shard: int, call: Call[Any, Any], count: int) -> Any:
        """The first `count` entries of a list, of which a shard gives a page at a time."""
        found: list[Any] = []
        while True:
            size = min(MOST_ON_A_PAGE, max(1, count - len(found)))
            answer = await invoke(shard, call.with_query(limit=size, offset=len(found)))
            some = self._list(answer)
            found += some
            if len(some) < size or len(found) >= count:
                return self._with([answer], found)

    def _merged(self, answers: Sequence[Any], query: Any) -> Iterable[Any]:
        key, descending = self._order(query)
        return heapq.merge(*map(self._list, answers), key=key, reverse=descending)

    def _list(self, answer: Any) -> list[Any]:
        listed: list[Any] = getattr(answer, self._items) if self._items else answer
        return listed

    def _with(self, answers: Sequence[Any], items: list[Any]) -> Any:
        if not self._items:
            return items
        merged = summed([msgspec.structs.replace(answer, **{self._items: []}) for answer in answers])
        return msgspec.structs.replace(merged, **{self._items: items})


class Custom:
    """Placed by a function of its own."""

    def __init__(self, place: Callable[[ShardRouter, Invoke, Call[Any, Any]], Awaitable[Any]]) -> None:
        self._place = place

    async def run(self, shards: ShardRouter, invoke: Invoke, call: Call[Any, Any]) -> Any:
        return await self._place(shards, invoke, call)


class _First:
    async def run(self, shards: ShardRouter, invoke: Invoke, call: Call[Any, Any]) -> Any:
        return await invoke(0, call)


FIRST_SHARD: Final[Placement] = _First()
"""On shard 0, which keeps what workers have counted for all shards."""


def value_of(call: Call[Any, Any], key: str) -> str:
    """What a call says for `key`: in its path, its body or its query."""
    value = call.params.get(key) or getattr(call.body, key, None) or getattr(call.query, key, None)
    return value if isinstance(value, str) else ""


def summed(answers: Sequence[Any]) -> Any:
    """Numbers are added, objects merged field by field, lists concatenated; of texts the first is taken."""
    given = [answer for answer in answers if answer is not None and answer is not msgspec.UNSET]
    if not given:
        return answers[0] if answers else None
    first = given[0]
    if isinstance(first, msgspec.Struct):
        merged = {
            field: getattr(first, field) if field in _NOT_SUMMED else summed([getattr(one, field) for one in given])
            for field in first.__struct_fields__
        }
        return msgspec.structs.replace(first, **merged)
    if isinstance(first, dict):
        keys = {key: None for answer in given for key in answer}
        return {key: summed([answer[key] for answer in given if key in answer]) for key in keys}
    if isinstance(first, list):
        return [one for answer in given for one in answer]
    if isinstance(first, bool):
        return all(given)
    if isinstance(first, int | float):
        return sum(given)
    return first


def labelled(items: str, label: str) -> Merge:
    """Lists in which objects with the same label are added to each other; in the order of their labels."""

    def merge(answers: Sequence[Any]) -> Any:
        found: dict[str, list[Any]] = {}
        for answer in answers:
            for one in getattr(answer, items):
                found.setdefault(getattr(one, label), []).append(one)
        return msgspec.structs.replace(answers[0], **{items: [summed(found[name]) for name in sorted(found)]})

    return merge


def sorted_union(answers: Sequence[Sequence[str]]) -> list[str]:
    """Sorted lists of texts, merged, each text once."""
    return list(dict.fromkeys(heapq.merge(*answers)))


def first_answer(answers: Sequence[Any]) -> Any:
    """Every shard answers the same."""
    return answers[0]
