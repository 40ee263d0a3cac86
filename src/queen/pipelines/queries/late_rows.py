"""Takes the rows that Spark would leave out because they are late from in front of the operators that do so.

An operator that keeps state leaves out rows, without a word, whose event time (or window) the watermark has passed. So
the plan of a step gets a filter under each of them, which lets such rows leave by the side. It has to stand where Spark
looks: above the filters of the step, and with the columns that are left to the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, functions
from pyspark.sql.classic.column import Column as JavaColumn
from pyspark.sql.pandas.types import to_arrow_type

from queen.pipelines.queries.operators import (
    JOIN,
    READS,
    analyzed,
    children_of,
    items,
    joins_streams,
    name_of,
    streaming,
)
from queen.pipelines.queries.side_output import IN_TIME, SideOutput

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_WATERMARK: Final = "spark.watermarkDelayMs"
_DONE: Final = "queen-late-rows"
_NUMBER: Final = "queen-operator"
_ROW: Final = "_late_row"
_COPY: Final = "_late_copy"
_GROUPING: Final = "spark_grouping_id"
# As many as Spark's optimizer tries.
_MOST_ROUNDS: Final = 100
# Those that leave out late rows, by what says that they do: nothing, or the name of a mode that has to be event time.
_LEAVES_OUT: Final = {
    "Aggregate": None,
    "Distinct": None,
    "Deduplicate": None,
    "DeduplicateWithinWatermark": None,
    JOIN: None,
    "FlatMapGroupsInPandasWithState": "timeout",
    "TransformWithStateInPySpark": "timeMode",
}
# What these give has all columns of what they are given, or can be made to have them.
_PASSES: Final = frozenset(
    {
        "CollectMetrics",
        "EventTimeWatermark",
        "Expand",
        "Filter",
        "Generate",
        "Project",
        "Repartition",
        "RepartitionByExpression",
        "ResolvedHint",
        JOIN,
    }
)


def divert_late_rows(side: SideOutput, step: str, rows: DataFrame, inputs: Sequence[DataFrame]) -> DataFrame:
    """The rows of a step, of whose `inputs` those that are late leave by the side. They are kept as they came in."""
    return _Step(side, step, rows, inputs).diverted()


def are_diverted_once(side: SideOutput, rows: DataFrame) -> bool:
    """Whether each place where late rows leave is in the plan once, and not where a step is used a second time."""
    filters = [one for one in streaming(analyzed(rows)) if name_of(one) == "Filter"]
    found = sum(str(one.condition().toString()).startswith(f"{IN_TIME}(") for one in filters)
    return found == sum(tap.late for tap in side.taps)


@dataclass(frozen=True, slots=True)
class _Carried:
    """A part of a plan, and those of its columns that it has been made to have for our sake."""

    plan: Any
    record: tuple[Any, ...] = ()
    """The columns of the input of the step; empty where they are not to be had."""
    row: Any = None
    """The id of a row of which copies are made further up, for each window that it is of."""
    copies: tuple[Any, ...] = field(default_factory=tuple)
    """Which of the copies it is."""
    earliest: tuple[Any, int] | None = None
    """The copy that is of the earliest window, where every row has it: if any copy of a row is late, this one is."""

    @property
    def columns(self) -> list[Any]:
        return [*self.record, *([self.row] if self.row is not None else ()), *self.copies]


class _Step:
    def __init__(self, side: SideOutput, step: str, rows: DataFrame, inputs: Sequence[DataFrame]) -> None:
        self._side = side
        self._step = step
        self._rows = rows
        self._spark = rows.sparkSession
        jvm: Any = self._spark._jvm
        self._jvm = jvm
        self._catalyst = jvm.org.apache.spark.sql.catalyst
        self._done = self._tag(_DONE)
        self._number = self._tag(f"{_NUMBER}-{step}")
        self._inputs = [_columns(analyzed(one)) for one in inputs]
        self._left: dict[int, Any] = {}
        self._rows_of: dict[int, set[int]] = {}

    def diverted(self) -> DataFrame:
        plan = self._filtered(analyzed(self._rows))
        operators = [one for one in streaming(plan) if _leaves_out(one) and not self._is_done(one)]
        if not operators:
            return self._rows
        for place, operator in enumerate(operators):
            operator.setTagValue(self._number, place)
        pruned = self._to_the_end(plan, self._catalyst.optimizer.ColumnPruning)
        self._left = {number: one for one in streaming(pruned) if (number := self._number_of(one)) is not None}
        taps = len(self._side.taps)
        rebuilt = self._rebuilt(plan)
        return self._frame(rebuilt) if len(self._side.taps) > taps else self._rows

    def _filtered(self, plan: Any) -> Any:
        """The plan with its filters where they work: a row that they remove is not there to be late."""
        analysis, optimizer = self._catalyst.analysis, self._catalyst.optimizer
        plan = analysis.EliminateSubqueryAliases.apply(analysis.EliminateView.apply(plan))
        for rule in (optimizer.EliminateOuterJoin, optimizer.InferFiltersFromConstraints):
            plan = rule.apply(self._to_the_end(plan, optimizer.PushDownPredicates))
        return self._to_the_end(plan, optimizer.PushDownPredicates)

    def _to_the_end(self, plan: Any, rule: Any) -> Any:
        for _ in range(_MOST_ROUNDS):
            before, plan = plan, rule.apply(plan)
            if plan.fastEquals(before):
                break
        return plan

    def _rebuilt(self, node: Any) -> Any:
        if not node.isStreaming():
            return node
        before = children_of(node)
        after = [self._rebuilt(child) for child in before]
        number = self._number_of(node)
        # What comes of an operator comes in time for the next: Spark's watermark of that one waits for it. After a join
        # that is a watermark which is not known here, and so is what is late for it.
        if number is not None and not any(joins_streams(one) for child in before for one in streaming(child)):
            after = [self._tapped(node, place, child) for place, child in enumerate(after)]
        if all(one is other for one, other in zip(before, after, strict=True)):
            return node
        rebuilt = node.withNewChildren(self._seq(after))
        if number is not None:
            rebuilt.setTagValue(self._done, self._step)
        return rebuilt

    def _tapped(self, operator: Any, place: int, child: Any) -> Any:
        event = self._event_time(operator, place, child)
        if event is None or not _is_read(child):
            return child
        own = _columns(child)
        carried = self._carried(child)
        column = self._column(event)
        windowed = _is_window(event)
        record = carried.record or [one for one in own if not (windowed and _id(one) == _id(event))]
        time = next((one for one in (*own, *record) if _has_watermark(one) and not _is_window(one)), None)
        end = column["end"] if windowed else column
        shown = _micros(self._column(time)) if time is not None else functions.lit(None).cast("long")
        times = [shown, _micros(end)]
        copied = carried.row is not None and bool(carried.copies)
        if copied:
            times += [self._column(carried.row), functions.concat_ws("-", *map(self._column, carried.copies))]
        schema, values = self._held(carried.plan, record)
        if carried.earliest is not None:
            # The record of a row is given to Python once.
            copy, number = carried.earliest
            is_earliest = self._column(copy) == number
            times = [*times[:2], *(functions.when(is_earliest, one) for one in times[2:])]
            values = [functions.when(is_earliest, one) for one in values]
        late = self._side.divert_late(self._step, schema, copied=copied)
        kept = self._frame(carried.plan).where(late(*times, *values)).select(*map(self._column, own))
        return analyzed(kept)

    def _event_time(self, operator: Any, place: int, child: Any) -> Any:
        """The column by which the operator tells late rows, if it does."""
        if name_of(operator) == "Aggregate":
            for one in items(operator.groupingExpressions()):
                if name_of(one) in ("Alias", "AttributeReference") and _has_watermark(one):
                    return one.child() if name_of(one) == "Alias" else one
            return None
        number = self._number_of(operator)
        left = children_of(self._left[number]) if number in self._left else children_of(operator)
        used = {_id(one) for one in _columns(left[place])}
        return next((one for one in _columns(child) if _has_watermark(one) and _id(one) in used), None)

    def _carried(self, node: Any) -> _Carried:
        """The part of a plan from the input of the step up to here, with all columns of that input."""
        own = {_id(one): one for one in _columns(node)}
        record = next((ids for ids in self._inputs if all(_id(one) in own for one in ids)), None)
        found = tuple(own[_id(one)] for one in record) if record is not None else ()
        streams = [number for number, child in enumerate(children_of(node)) if child.isStreaming()]
        if name_of(node) not in _PASSES or len(streams) != 1:
            return _Carried(node, found)
        below = children_of(node)[streams[0]]
        if found and not {_id(one) for one in found} <= {_id(one) for one in _columns(below)}:
            # Here the step begins.
            return _Carried(node, found)
        carried = self._carried(below)
        # As it is furthest up: what is below the watermark does not say that it has one.
        carried = replace(carried, record=found or carried.record)
        if name_of(node) == "Expand":
            return self._copied(node, carried)
        if name_of(node) in ("Filter", JOIN) and not self._is_of_rows(node, carried):
            carried = replace(carried, earliest=None)
        missing = [one for one in carried.columns if _id(one) not in own]
        if name_of(node) == "Project":
            listed = self._seq([*items(node.projectList()), *missing])
            return replace(carried, plan=self._catalyst.plans.logical.Project(listed, carried.plan))
        children = children_of(node)
        children[streams[0]] = carried.plan
        made = node.withNewChildren(self._seq(children))
        has = {_id(one) for one in _columns(made)}
        return replace(carried, plan=made) if {_id(one) for one in missing} <= has else _Carried(node, found)

    def _copied(self, expand: Any, carried: _Carried) -> _Carried:
        """Of each row it makes some, for windows or grouping sets: which belong together must be known above it."""
        below, row = carried.plan, carried.row
        if row is None:
            numbered = self._frame(below).select(*map(self._column, _columns(below)), functions.uuid().alias(_ROW))
            below = analyzed(numbered)
            row = _columns(below)[-1]
        copy = _columns(analyzed(self._frame(below).select(functions.lit(0).alias(_COPY))))[0]
        given = replace(carried, row=row)
        own = {_id(one) for one in _columns(expand)}
        missing = [one for one in given.columns if _id(one) not in own]
        projections = [
            self._seq([*items(one), *missing, self._literal(number)])
            for number, one in enumerate(items(expand.projections()))
        ]
        output = self._seq([*_columns(expand), *missing, copy])
        made = self._catalyst.plans.logical.Expand(self._seq(projections), output, below)
        earliest = carried.earliest
        if row is not carried.row and not any(one.name() == _GROUPING for one in _columns(expand)):
            # Spark's windows of a row go back in time.
            earliest = copy, len(projections) - 1
            self._rows_of[_id(copy)] = {_id(one) for one in _columns(below)}
        return replace(given, plan=made, copies=(*carried.copies, copy), earliest=earliest)

    def _is_of_rows(self, node: Any, carried: _Carried) -> bool:
        """Whether a filter looks at nothing in which the copies of a row differ."""
        if carried.earliest is None or name_of(node) == JOIN:
            return False
        used = {_id(one) for one in items(node.references().toSeq())}
        return used <= self._rows_of[_id(carried.earliest[0])]

    def _held(self, plan: Any, record: Sequence[Any]) -> tuple[StructType, list[Column]]:
        """The columns of a record, and their types; what Arrow does not hold as text."""
        columns = list(map(self._column, {one.name(): one for one in reversed(record)}.values()))[::-1]
        schema = self._frame(plan).select(*columns).schema
        values = [
            column if _is_held(kind.dataType) else column.cast("string")
            for column, kind in zip(columns, schema.fields, strict=True)
        ]
        named = [value.alias(kind.name) for value, kind in zip(values, schema.fields, strict=True)]
        return self._frame(plan).select(*named).schema, values

    def _is_done(self, operator: Any) -> bool:
        return bool(operator.getTagValue(self._done).isDefined())

    def _number_of(self, operator: Any) -> int | None:
        found = operator.getTagValue(self._number)
        return int(found.get()) if found.isDefined() else None

    def _frame(self, plan: Any) -> DataFrame:
        made = self._jvm.org.apache.spark.sql.classic.Dataset.ofRows(self._spark._jsparkSession, plan)
        return DataFrame(made, self._spark)

    def _column(self, attribute: Any) -> Column:
        return JavaColumn(self._jvm.org.apache.spark.sql.classic.ExpressionUtils.column(attribute))

    def _literal(self, number: int) -> Any:
        return getattr(getattr(self._catalyst.expressions, "Literal$"), "MODULE$").apply(number)

    def _seq(self, items: Sequence[Any]) -> Any:
        return self._jvm.PythonUtils.toSeq(list(items))

    def _tag(self, name: str) -> Any:
        return self._catalyst.trees.TreeNodeTag(name)


def _leaves_out(operator: Any) -> bool:
    name = name_of(operator)
    if name not in _LEAVES_OUT:
        return False
    if name == JOIN:
        return joins_streams(operator)
    mode = _LEAVES_OUT[name]
    return mode is None or str(getattr(operator, mode)().toString()).startswith("EventTime")


def _is_read(operator: Any) -> bool:
    """Whether it has rows of a stream that no operator before it could have left out."""
    if name_of(operator) in READS:
        return True
    streams = [child for child in children_of(operator) if child.isStreaming()]
    return not _leaves_out(operator) and any(map(_is_read, streams))


def _columns(plan: Any) -> list[Any]:
    return items(plan.output())


def _id(attribute: Any) -> int:
    return int(attribute.exprId().id())


def _has_watermark(attribute: Any) -> bool:
    return bool(attribute.metadata().contains(_WATERMARK))


def _is_window(attribute: Any) -> bool:
    return str(attribute.dataType().typeName()) == "struct"


def _micros(time: Column) -> Column:
    return functions.unix_micros(time.cast("timestamp"))


def _is_held(kind: DataType) -> bool:
    try:
        to_arrow_type(kind, timezone="UTC")
    except PySparkException:
        return False
    return True
