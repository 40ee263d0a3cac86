"""The position of a stream: how far each partition of each queue was read, as it lies in Spark's checkpoint.

    {"orders": {"Default": [57, 1200], "eu": [58, 3]}}

Beside the offset of the next message stands the number of the partition's row: a partition that was removed and made
anew begins again at 0, and is told from the old one by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from queen.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Place:
    """The next offset of a partition, and the row that the partition is."""

    queue: str
    partition: str
    id: int
    offset: int


def to_json(places: Iterable[Place]) -> dict[str, Any]:
    """What Spark keeps. Spark compares it as text, so it comes in one order."""
    queues: dict[str, dict[str, list[int]]] = {}
    for place in sorted(places, key=lambda place: (place.queue, place.partition)):
        queues.setdefault(place.queue, {})[place.partition] = [place.id, place.offset]
    return queues


def from_json(offset: Mapping[str, Any]) -> list[Place]:
    """The places of an offset as Spark gives it back, or as it stands in a query's progress."""
    return list(_places(offset))


def _places(offset: Mapping[str, Any]) -> Iterator[Place]:
    try:
        for queue, partitions in offset.items():
            for partition, (row, position) in partitions.items():
                yield Place(queue, partition, int(row), int(position))
    except (AttributeError, TypeError, ValueError) as error:
        raise SettingsError(f"the checkpoint was not written by format queen: {offset!r}") from error


def messages_between(start: Mapping[str, Any], end: Mapping[str, Any]) -> int:
    """How many messages lie between two positions, such as a progress's `endOffset` and `latestOffset`."""
    before = {(place.queue, place.id): place.offset for place in from_json(start)}
    return sum(max(0, place.offset - before.get((place.queue, place.id), 0)) for place in from_json(end))
