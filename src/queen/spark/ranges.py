"""From the options to the spans that a batch reads."""

from __future__ import annotations

from collections.abc import Sequence

from queen.errors import NotFound
from queen.spark.log import Log, Position, Span
from queen.spark.options import Edge, EdgeKind


def edge_offsets(log: Log, positions: Sequence[Position], edge: Edge, *, otherwise: EdgeKind) -> list[int]:
    """The offset at which an edge cuts each partition, within what its log holds.

    Partitions for which no offset was given are cut at the end that `otherwise` names.
    """
    check_partitions(positions, edge)
    if edge.kind is EdgeKind.TIME and edge.time is not None:
        return log.offsets_from(positions, edge.time)
    return [_offset(position, edge, otherwise) for position in positions]


def check_partitions(positions: Sequence[Position], edge: Edge) -> None:
    """An offset that was given for a partition that is not there is a mistake, or comes too early."""
    if edge.offsets is None:
        return
    known = {(position.queue, position.partition) for position in positions}
    partitions = {partition for _, partition in known}
    for queue, offsets in edge.offsets.items():
        for partition in offsets:
            if (queue, partition) not in known and (queue or partition not in partitions):
                where = f"queue {queue!r} has" if queue else "the queue has"
                raise NotFound(f"an offset was given for partition {partition!r}, but {where} no such partition")


def spans_between(positions: Sequence[Position], starts: Sequence[int], ends: Sequence[int]) -> list[Span]:
    return [
        Span(position.queue, position.partition, position.shard, position.id, start, end)
        for position, start, end in zip(positions, starts, ends, strict=True)
        if start < end
    ]


def _offset(position: Position, edge: Edge, otherwise: EdgeKind) -> int:
    given = edge.offset(position.queue, position.partition)
    if given is not None:
        return min(max(given, position.first), position.next)
    kind = otherwise if edge.kind is EdgeKind.OFFSETS else edge.kind
    return position.first if kind is EdgeKind.EARLIEST else position.next
