"""The offset of a stream as Spark's checkpoint keeps it: the next offset of every partition, as vectors.

    {"format": 2, "queues": {"orders": "c$|a(..."}}

Partitions are known by the ids of their rows: one that was removed and created again begins at 0 under another id. The
text of a queue is the ids (as differences) and the offsets, as columns of bytes, compressed. Checkpoints of the first
format, {"orders": {"Default": [57, 1200]}}, name each partition with its id and offset; they are read as well.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from queen.errors import SettingsError

Numbers = npt.NDArray[np.int64]

_FORMAT: Final = 2


@dataclass(frozen=True, slots=True)
class PartitionOffsets:
    """The next offset of each partition of a queue, by ascending id."""

    ids: Numbers
    offsets: Numbers

    def of(self, ids: Numbers, otherwise: Numbers) -> Numbers:
        """The offsets of these partitions; `otherwise` where one is not known."""
        if not len(self.ids):
            return otherwise
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, self.offsets[places], otherwise)


StreamOffset = dict[str, PartitionOffsets]


def offsets_of(ids: Numbers | list[int], offsets: Numbers | list[int]) -> PartitionOffsets:
    """In ascending order of the ids, whatever order they come in."""
    numbers, places = np.asarray(ids, np.int64), np.asarray(offsets, np.int64)
    order = np.argsort(numbers, kind="stable")
    return PartitionOffsets(numbers[order], places[order])


def encode_offset(offset: Mapping[str, PartitionOffsets]) -> dict[str, Any]:
    """What Spark keeps. Spark compares it as text, so it comes in one order."""
    return {"format": _FORMAT, "queues": {queue: _pack(offset[queue]) for queue in sorted(offset)}}


def decode_offset(offset: Mapping[str, Any]) -> StreamOffset:
    """An offset as Spark gives it back, or as it stands in a query's progress."""
    try:
        if offset.get("format") == _FORMAT:
            return {queue: _unpack(text) for queue, text in offset["queues"].items()}
        return {
            queue: offsets_of([id for id, _ in partitions.values()], [at for _, at in partitions.values()])
            for queue, partitions in offset.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
        shown = str(offset)[:200]
        raise SettingsError(f"the checkpoint was not written by format queen: {shown}") from error


def count_between(before: Mapping[str, PartitionOffsets], after: Mapping[str, PartitionOffsets]) -> int:
    total = 0
    for queue, ends in after.items():
        zeros = np.zeros(len(ends.ids), np.int64)
        starts = before[queue].of(ends.ids, zeros) if queue in before else zeros
        total += int(np.maximum(ends.offsets - starts, 0).sum())
    return total


def _pack(offsets: PartitionOffsets) -> str:
    # Byte by byte, most of the columns are zeros, which compress to nothing.
    columns = np.stack([np.diff(offsets.ids, prepend=0), offsets.offsets]).astype("<i8")
    planes = columns.view(np.uint8).reshape(2, -1, 8).transpose(0, 2, 1)
    return base64.b85encode(zlib.compress(planes.tobytes(), 6)).decode()


def _unpack(text: str) -> PartitionOffsets:
    planes = np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8).reshape(2, 8, -1)
    columns = np.ascontiguousarray(planes.transpose(0, 2, 1)).view("<i8").reshape(2, -1).astype(np.int64)
    return PartitionOffsets(np.cumsum(columns[0]), columns[1])
