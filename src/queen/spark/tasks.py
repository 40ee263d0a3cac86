"""How spans are shared out among tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from pyspark.sql.datasource import InputPartition

from queen.spark.log import Span

_FEWEST_ROWS: Final = 20_000
_MOST_ROWS: Final = 5_000_000


@dataclass
class SpanTask(InputPartition):
    """What one task reads."""

    spans: tuple[Span, ...]


def share_out(spans: Sequence[Span], max_tasks: int) -> list[SpanTask]:
    """At most `max_tasks` tasks of the same size, big spans cut where need be.

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
