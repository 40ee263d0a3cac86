"""From the options to the spans that tasks read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from pyspark.sql.datasource import InputPartition

from queen.errors import NotFound
from queen.spark.options import Edge, EdgeKind, ReadOptions
from queen.spark.source.logs import Log, Position, Span


def queues_to_read(log: Log, options: ReadOptions) -> tuple[str, ...]:
    """The queues that the options name, or those whose names match the pattern now."""
    if options.pattern is None:
        return options.queues
    pattern = re.compile(options.pattern)
    return tuple(name for name in log.queue_names() if pattern.fullmatch(name))


def edge_offsets(log: Log, positions: Sequence[Position], edge: Edge, *, otherwise: EdgeKind) -> list[int]:
    """The offset at which an edge cuts each partition, within what its log holds.

    Partitions for which no offset was given are cut at the end that `otherwise` names.
    """
    check_partitions(positions, edge)
    if edge.kind is EdgeKind.TIME and edge.time is not None:
        return log.offsets_from(positions, edge.time)
    return [_offset(position, edge, otherwise) for position in positions]


def check_partitions(positions: Sequence[Position], edge: Edge) -> None:
    """An offset that was given for a partition that does not exist is a mistake, or comes too early."""
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


_FEWEST_ROWS: Final = 20_000
_MOST_ROWS: Final = 5_000_000


@dataclass
class SpanTask(InputPartition):
    """What one task reads."""

    spans: tuple[Span, ...]


def share_out(spans: Sequence[Span], max_tasks: int) -> list[SpanTask]:
    """At most `max_tasks` tasks of the same size, large spans split where need be.

    A task costs more than thousands of messages do, so few messages make few tasks; and so that not everything is done
    again when one fails, very many make more than `max_tasks`.
    """
    wanted = [span for span in spans if span.count > 0]
    rows = sum(span.count for span in wanted)
    if not rows:
        return []
    tasks = max(min(max_tasks, -(-rows // _FEWEST_ROWS)), -(-rows // _MOST_ROWS))
    size = -(-rows // tasks)
    shares: list[list[Span]] = [[]]
    room = size
    for span in wanted:
        rest = span
        while rest.count > room:
            if room:
                shares[-1].append(replace(rest, end=rest.start + room))
                rest = replace(rest, start=rest.start + room)
            shares.append([])
            room = size
        shares[-1].append(rest)
        room -= rest.count
    return [SpanTask(tuple(share)) for share in shares if share]
