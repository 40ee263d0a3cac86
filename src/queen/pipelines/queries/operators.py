"""What Spark's plan of a DataFrame says: how many of its operators keep state, and how often it reads its sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Of a row they make rows without a look at any other: on a batch they do what they do on the stream.
_STATELESS: Final = frozenset(
    {
        "ArrowEvalPython",
        "BatchEvalPython",
        "CollectMetrics",
        "EventTimeWatermark",
        "Filter",
        "Generate",
        "MapInArrow",
        "MapInPandas",
        "Project",
        "ResolvedHint",
        "StreamingRelation",
        "StreamingRelationV2",
        "SubqueryAlias",
        "Union",
        "View",
    }
)
_READS: Final = ("StreamingRelation", "StreamingRelationV2")
_JOIN: Final = "Join"


def stateful_operators(rows: DataFrame) -> int:
    """How many operators of a stream keep state, as far as is known: an unknown one counts."""
    return sum(1 for operator in _streaming(rows) if _keeps_state(operator))


def stream_reads(rows: DataFrame) -> int:
    """How many times a plan reads a stream; a source that is used twice in it is read twice."""
    return sum(1 for operator in _streaming(rows) if _name(operator) in _READS)


def _streaming(rows: DataFrame) -> Iterator[Any]:
    waiting = [rows._jdf.queryExecution().analyzed()]
    while waiting:
        operator = waiting.pop()
        if operator.isStreaming():
            yield operator
            waiting += _children(operator)


def _keeps_state(operator: Any) -> bool:
    if _name(operator) == _JOIN:
        # With a table that does not move, each row is joined for itself.
        return all(child.isStreaming() for child in _children(operator))
    return _name(operator) not in _STATELESS


def _children(operator: Any) -> list[Any]:
    children = operator.children()
    return [children.apply(number) for number in range(children.size())]


def _name(operator: Any) -> str:
    return str(operator.getClass().getSimpleName())
