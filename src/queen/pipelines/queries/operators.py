"""What Spark's plan of a DataFrame says: how many of its operators keep state, and how often it reads its sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Of a row they make rows without a look at any other: on a batch they do what they do on the stream.
_STATELESS: Final = frozenset(
    {
        "ArrowEvalPython",
        "BatchEvalPython",
        "CollectMetrics",
        "EventTimeWatermark",
        "Expand",
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
READS: Final = ("StreamingRelation", "StreamingRelationV2")
JOIN: Final = "Join"


def stateful_operators(rows: DataFrame) -> int:
    """How many operators of a stream keep state, as far as is known: an unknown one counts."""
    return sum(1 for operator in streaming(analyzed(rows)) if _keeps_state(operator))


def stream_reads(rows: DataFrame) -> int:
    """How many times a plan reads a stream; a source that is used twice in it is read twice."""
    return sum(1 for operator in streaming(analyzed(rows)) if name_of(operator) in READS)


def joins_streams(operator: Any) -> bool:
    """With a table that does not move, each row is joined for itself."""
    return name_of(operator) == JOIN and all(child.isStreaming() for child in children_of(operator))


def analyzed(rows: DataFrame) -> Any:
    """The plan of rows, with all names and types found, and what a WITH names in the places where it is used."""
    jvm: Any = rows.sparkSession._jvm
    make = jvm.org.apache.spark.sql.catalyst.optimizer.InlineCTE
    try:
        inline = make(True, False, False)
    except Py4JError:
        # As it was in Spark 4.2.
        inline = make(True, False)
    return inline.apply(rows._jdf.queryExecution().analyzed())


def streaming(plan: Any) -> Iterator[Any]:
    """The operators of a plan that work on a stream, from the top."""
    waiting = [plan]
    while waiting:
        operator = waiting.pop()
        if operator.isStreaming():
            yield operator
            waiting += children_of(operator)


def children_of(operator: Any) -> list[Any]:
    return items(operator.children())


def items(sequence: Any) -> list[Any]:
    """What is in a sequence of Scala."""
    return [sequence.apply(number) for number in range(sequence.size())]


def name_of(node: Any) -> str:
    """The class of an operator or expression."""
    return str(node.getClass().getSimpleName())


def _keeps_state(operator: Any) -> bool:
    name = name_of(operator)
    return joins_streams(operator) if name == JOIN else name not in _STATELESS
