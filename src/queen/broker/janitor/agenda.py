"""What is to be looked at when: ids by the moment before which there is no use in looking."""

from __future__ import annotations

import heapq
import math
from array import array
from dataclasses import dataclass

AT_ONCE = 0.0
"""A moment that has always passed."""


@dataclass(slots=True)
class Room:
    """How many ids may yet be remembered, by all that share it."""

    left: int


class Agenda:
    """Ids on pages, one for each `grain` seconds: 8 bytes for an id, and some 250 for a page that is in use.

    Taking what is due costs as much as there is to take, however much waits on later pages.
    """

    def __init__(self, grain: float, room: Room) -> None:
        self._grain = grain
        self._room = room
        self._pages: dict[int, array[int]] = {}
        self._numbers: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, id_: int, moment: float) -> bool:
        """Have an id taken at a moment, or up to a grain later; False when there is no room for it."""
        if not self._room.left:
            return False
        number = math.ceil(moment / self._grain)
        if number * self._grain < moment:
            # The quotient was rounded down to a whole number.
            number += 1
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = array("q")
            heapq.heappush(self._numbers, number)
        page.append(id_)
        self._count += 1
        self._room.left -= 1
        return True

    def take(self, now: float) -> list[int]:
        """All ids whose moment has come, which are no longer in the agenda then."""
        ids: list[int] = []
        while self._numbers and self._numbers[0] * self._grain <= now:
            ids += self._pages.pop(heapq.heappop(self._numbers))
        self._count -= len(ids)
        self._room.left += len(ids)
        return ids

    def clear(self) -> None:
        self._room.left += self._count
        self._count = 0
        self._pages.clear()
        self._numbers.clear()
