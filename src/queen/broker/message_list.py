"""Which messages are on a page of the list: newest first over any number of partitions, without reading bodies.

Every partition offers a span of offsets. Segments are told apart by their heads alone (where they start, how many
messages they hold, when they were stored) and read from the newest back, only in the partitions and only as far as the
page needs. A deleted message keeps its place: a page may hold fewer messages than it has places for.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from queen.broker.stored_messages import Place
from queen.storage.database import Fetcher, Record

_FIRST_HEADS = 4
_MOST_HEADS = 4096


class _Head(NamedTuple):
    """A segment without its body, sorted as the list is; `offsets` are those listed, newest first."""

    age: float
    partition_id: int
    back: int
    offsets: Sequence[int]


class _Front(NamedTuple):
    """How far back a partition has been read: how old what is left of it is at least, and its span of offsets."""

    age: float
    partition_id: int
    first_offset: int
    last_offset: int
    heads: int = _FIRST_HEADS


async def page_of(
    fetcher: Fetcher, spans: Sequence[Record], *, without_dead: bool, limit: int, offset: int
) -> list[Place]:
    """The places of a page, newest first; `spans` are rows of `message_spans`, up to `limit + offset` of them."""
    fronts = [
        _Front(-row["newest_at"].timestamp(), row["id"], row["first_offset"], row["last_offset"]) for row in spans
    ]
    if len(fronts) == 1 and not without_dead:
        # Within one partition the list is its offsets backwards: no need to read what is skipped.
        (front,) = fronts
        fronts = [front._replace(last_offset=max(front.first_offset, front.last_offset - offset))]
        offset = 0
    merge = _Merge(fetcher, fronts, without_dead)
    places: list[Place] = []
    while len(places) < limit:
        for head in merge.settled():
            if offset >= len(head.offsets):
                offset -= len(head.offsets)
                continue
            room = limit - len(places)
            places += [(head.partition_id, listed) for listed in head.offsets[offset : offset + room]]
            offset = 0
            if len(places) == limit:
                break
        else:
            if not await merge.read_on():
                break
    return places


class _Merge:
    """Heads of many partitions in one order, read a bounded number at a time."""

    def __init__(self, fetcher: Fetcher, fronts: list[_Front], without_dead: bool) -> None:
        self._fetcher = fetcher
        self._without_dead = without_dead
        self._fronts = fronts
        self._heads: list[_Head] = []
        heapq.heapify(self._fronts)

    def settled(self) -> Iterator[_Head]:
        """Take the heads that are newer than anything still unread: they have their final place."""
        while self._heads and (not self._fronts or self._heads[0].age < self._fronts[0].age):
            yield heapq.heappop(self._heads)

    async def read_on(self) -> bool:
        """Read the partitions further back that may hold the newest of what is unread; False when all is read."""
        chosen: list[_Front] = []
        room = _MOST_HEADS
        while self._fronts and room > 0:
            chosen.append(heapq.heappop(self._fronts))
            room -= chosen[-1].heads
        if not chosen:
            return False
        rows = await self._fetcher.fetch(
            "newest_segments",
            [front.partition_id for front in chosen],
            [front.first_offset for front in chosen],
            [front.last_offset for front in chosen],
            [front.heads for front in chosen],
            self._without_dead,
        )
        for slot, own in groupby(rows, key=itemgetter("slot")):
            self._add(chosen[slot - 1], list(own))
        return True

    def _add(self, front: _Front, rows: list[Record]) -> None:
        """Take in the next heads of a partition, newest first; unless those were the last, it has more."""
        age, last = front.age, front.last_offset
        for row in rows:
            base = row["base_offset"]
            lowest = max(base, front.first_offset)
            offsets: Sequence[int] = range(min(base + row["count"], last) - 1, lowest - 1, -1)
            if row["dead"]:
                dead = set(row["dead"])
                offsets = [listed for listed in offsets if listed not in dead]
            age, last = -row["created_at"].timestamp(), lowest
            heapq.heappush(self._heads, _Head(age, front.partition_id, -base, offsets))
        if len(rows) == front.heads and front.first_offset < last:
            more = min(front.heads * 2, _MOST_HEADS)
            heapq.heappush(self._fronts, _Front(age, front.partition_id, front.first_offset, last, more))
