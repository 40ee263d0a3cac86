"""Answers of all shards, made one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec

from queen.http.api.params import MOST_ON_A_PAGE, read_page
from queen.http.placement.calls import Calls, Handlers, call, with_query
from queen.http.server.message import Request, Response, json_response
from queen.http.server.router import Handler

Json: TypeAlias = Any
Merge: TypeAlias = Callable[[Sequence[Json]], Json]

# What is the same on every shard, or means nothing as a sum.
_NOT_SUMMED: Final = frozenset({"bucketMinutes", "limit", "offset", "statsAge", "worker", "pointCount"})


class Merging:
    """Asks all shards."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def merged(self, handlers: Handlers, request: Request, merge: Merge) -> Response:
        responses = await self._calls.everywhere(handlers, request)
        return json_response(responses[0].status, merge([_json(response) for response in responses]))

    async def changed(self, handlers: Handlers, request: Request, merge: Merge) -> Response:
        """The same for what changes something, which no shard may miss."""
        responses = await self._calls.everyone(handlers, request)
        return json_response(responses[0].status, merge([_json(response) for response in responses]))

    async def page(
        self, handlers: Handlers, request: Request, items: str, key: Callable[[Json], Any], default: int, newest: bool
    ) -> Response:
        """A page of what all shards have: the heads of their lists are merged through a heap."""
        limit, offset = read_page(request, default)
        whole = await self._calls.everywhere(
            [partial(_upto, handler, items, offset + limit) for handler in handlers], request
        )
        answers = [_json(response) for response in whole]
        listed = heapq.merge(*(_list(answer, items) for answer in answers), key=key, reverse=newest)
        page = [one for place, one in enumerate(listed) if offset <= place < offset + limit]
        if isinstance(answers[0], list):
            return json_response(200, page)
        merged = summed([{name: value for name, value in answer.items() if name != items} for answer in answers])
        if isinstance(merged.get("pagination"), dict):
            merged["pagination"] |= {"limit": limit, "offset": offset}
        for name, value in (("limit", limit), ("offset", offset)):
            if name in merged:
                merged[name] = value
        return json_response(200, merged | {items: page})


def summed(answers: Sequence[Json]) -> Json:
    """Numbers are added, what is in objects is merged, lists follow each other, and of texts the first is taken."""
    first = next((answer for answer in answers if answer is not None), None)
    if isinstance(first, dict):
        keys = {key: None for answer in answers if isinstance(answer, dict) for key in answer}
        return {
            key: _of_key(key, [answer[key] for answer in answers if isinstance(answer, dict) and key in answer])
            for key in keys
        }
    if isinstance(first, list):
        return [one for answer in answers if isinstance(answer, list) for one in answer]
    if isinstance(first, bool):
        return all(answer for answer in answers if isinstance(answer, bool))
    if isinstance(first, int | float):
        return sum(answer for answer in answers if isinstance(answer, int | float))
    return first


def by_label(label: str) -> Merge:
    """Lists of objects, in which those with the same label are added to each other; in the order of their labels."""

    def merge(answers: Sequence[Json]) -> Json:
        found: dict[str, list[Json]] = {}
        for answer in answers:
            for one in answer:
                found.setdefault(one[label], []).append(one)
        return [summed(found[name]) | {label: name} for name in sorted(found)]

    return merge


def labelled(items: str, label: str) -> Merge:
    """The same for a list in an object."""
    merge = by_label(label)

    def within(answers: Sequence[Json]) -> Json:
        return summed([{k: v for k, v in answer.items() if k != items} for answer in answers]) | {
            items: merge([answer[items] for answer in answers])
        }

    return within


def in_order(answers: Sequence[Json]) -> Json:
    """Sorted lists of texts, merged through a heap; what several have is told once."""
    return list(dict.fromkeys(heapq.merge(*answers)))


def _of_key(key: str, values: Sequence[Json]) -> Json:
    return values[0] if key in _NOT_SUMMED else summed(values)


def _json(response: Response) -> Json:
    return msgspec.json.decode(response.body)


def _list(answer: Json, items: str) -> list[Json]:
    return answer if isinstance(answer, list) else answer[items]


async def _upto(handler: Handler, items: str, count: int, request: Request) -> Response:
    """The first so many of a list, of which a shard gives a page at a time."""
    found: list[Json] = []
    while True:
        size = min(MOST_ON_A_PAGE, max(1, count - len(found)))
        answer = _json(await call(handler, with_query(request, limit=size, offset=len(found))))
        some = _list(answer, items)
        found += some
        if len(some) < size or len(found) >= count:
            break
    return json_response(200, found if isinstance(answer, list) else answer | {items: found})
