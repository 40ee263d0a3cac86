"""Takes the rows that Spark would leave out because they are late from in front of the operators that do so.

An operator that keeps state leaves out rows, without a word, whose event time (or window) the watermark has passed. So
the plan of a step gets a filter under each of them. It has to stand where Spark looks: above the filters of the step,
and with the columns that are left to the operator. That rows leave by the side is seen to below, where Spark has not
yet made a copy of a row for each of its windows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import pyspark
from py4j.protocol import Py4JError
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
from queen.pipelines.queries.side_output import SideOutput

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

log = logging.getLogger(__name__)

_WATERMARK: Final = "spark.watermarkDelayMs"
_DONE: Final = "queen-late-rows"
_NUMBER: Final = "queen-operator"
_LATE_UNTIL: Final = "_late_until"
# What is raised where something of Spark's is missing or takes other arguments.
_OF_ANOTHER_SPARK: Final = (Py4JError, PySparkException, AttributeError, TypeError)
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

# What these do to a row is known from its columns.
_ALIKE: Final = frozenset({"EventTimeWatermark", "Expand", "Filter", "Project", "Repartition", "ResolvedHint"})


def divert_late_rows(side: SideOutput, step: str, rows: DataFrame, inputs: Sequence[DataFrame]) -> DataFrame:
    """The rows of a step, of whose `inputs` those that are late leave by the side. They are kept as they came in."""
    taps = len(side.taps)
    try:
        return _Step(side, step, rows, inputs).diverted()
    except _OF_ANOTHER_SPARK:
        del side.taps[taps:]
        log.debug("late rows of '%s' are left to Spark", step, exc_info=True)
        _warn()
        return rows


@cache
def _warn() -> None:
    log.warning("late rows are only counted: PySpark %s plans queries in another way", pyspark.__version__)


def are_diverted_once(side: SideOutput, rows: DataFrame) -> bool:
    """Whether each place where late rows leave is in the plan once, and not where a step is used a second time."""
    filters = [one for one in streaming(analyzed(rows)) if name_of(one) == "Filter"]
    found = sum(_LATE_UNTIL in str(one.condition().toString()) for one in filters)
    return found == sum(tap.late for tap in side.taps)


@dataclass(frozen=True, slots=True)
class _Carried:
    """A part of a plan that has been made to have the columns of the input of the step."""

    plan: Any
    record: tuple[Any, ...] = ()
    """These columns; empty where they are not to be had."""


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

    def diverted(self) -> DataFrame:
        plan = self._raised(self._filtered(analyzed(self._rows)))
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
        path = self._path(child)
        below = children_of(path[-1])[0] if path else child
        own = _columns(below)
        carried = self._carried(below)
        record = carried.record or [one for one in own if not (_is_window(event) and _id(one) == _id(event))]
        time = next((one for one in (*own, *record) if _has_watermark(one) and not _is_window(one)), None)
        shown = _micros(self._column(time)) if time is not None else functions.lit(None).cast("long")
        ends = self._ends(path, event)
        first_end = functions.least(*ends) if len(ends) > 1 else ends[0]
        schema, values = self._held(carried.plan, record)
        late = self._side.divert_late(self._step, schema)(shown, first_end, *values)
        plan = analyzed(self._frame(carried.plan).select(*map(self._column, own), late.alias(_LATE_UNTIL)))
        watermark = _columns(plan)[-1]
        for node in reversed(path):
            plan = self._giving(node, plan, [watermark])
        in_time = functions.coalesce(self._end(event) > self._column(watermark), functions.lit(True))
        return analyzed(self._frame(plan).where(in_time).select(*map(self._column, _columns(child))))

    def _path(self, child: Any) -> list[Any]:
        """The operators from here down to where copies are made of a row, if what becomes of them is known there."""
        path: list[Any] = []
        node, copied = child, 0
        while name_of(node) in _ALIKE and _is_deterministic(node):
            below = children_of(node)[0]
            if self._begins(node, below):
                break
            path.append(node)
            if name_of(node) == "Expand":
                copied = len(path)
            node = below
        return path[:copied]

    def _ends(self, path: Sequence[Any], event: Any) -> list[Column]:
        """By the columns of a row of which the `path` makes copies: when each copy ends, if no filter removes it."""
        ends = []
        for chosen in product(*(items(node.projections()) for node in path if name_of(node) == "Expand")):
            projections = iter(chosen)
            found = [event]
            for node in path:
                if name_of(node) == "Filter":
                    found.append(node.condition())
                elif name_of(node) == "Project":
                    found = self._replaced(found, items(node.projectList()))
                elif name_of(node) == "Expand":
                    given = zip(_columns(node), items(next(projections)), strict=True)
                    found = self._replaced(found, [self._alias(one, column) for column, one in given])
            end, conditions = self._end(found[0]), map(self._column, found[1:])
            ends.append(reduce(lambda made, condition: functions.when(condition, made), conditions, end))
        return ends

    def _replaced(self, expressions: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
        """Expressions with what the columns stand for in place of them."""
        rule = self._object(self._catalyst.optimizer, "CollapseProject")
        meant = rule.getAliasMap(self._seq(columns))
        return [rule.replaceAlias(one, meant) for one in expressions]

    def _alias(self, expression: Any, column: Any) -> Any:
        none = self._jvm.scala.Option.empty()
        return self._catalyst.expressions.Alias(
            expression, column.name(), column.exprId(), column.qualifier(), none, self._seq([])
        )

    def _end(self, event: Any) -> Column:
        column = self._column(event)
        return _micros(column["end"] if _is_window(event) else column)

    def _giving(self, node: Any, child: Any, columns: Sequence[Any]) -> Any:
        """An operator on a child, with columns of that child beside its own."""
        if name_of(node) == "Project":
            return self._catalyst.plans.logical.Project(self._seq([*items(node.projectList()), *columns]), child)
        if name_of(node) == "Expand":
            projections = [self._seq([*items(one), *columns]) for one in items(node.projections())]
            return self._expand(projections, [*_columns(node), *columns], child)
        after = [child if one.isStreaming() else one for one in children_of(node)]
        return node.withNewChildren(self._seq(after))

    def _expand(self, projections: Sequence[Any], output: Sequence[Any], child: Any) -> Any:
        return self._catalyst.plans.logical.Expand(self._seq(projections), self._seq(output), child)

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
        streams = [child for child in children_of(node) if child.isStreaming()]
        if name_of(node) not in _PASSES or len(streams) != 1 or self._begins(node, streams[0]):
            return _Carried(node, found)
        carried = self._carried(streams[0])
        # As it is furthest up: what is below the watermark does not say that it has one.
        carried = replace(carried, record=found or carried.record)
        missing = [one for one in carried.record if _id(one) not in own]
        made = self._giving(node, carried.plan, missing)
        return replace(carried, plan=made) if _ids(missing) <= _ids(_columns(made)) else _Carried(node, found)

    def _begins(self, node: Any, below: Any) -> bool:
        """Whether it is from here up that the rows are those of an input of the step."""
        found = next((ids for ids in map(_ids, self._inputs) if ids <= _ids(_columns(node))), set())
        return not found <= _ids(_columns(below))

    def _raised(self, node: Any) -> Any:
        """The plan with copies of rows made as late as can be: what is done to each alike is done to the row before."""
        if not node.isStreaming():
            return node
        before = children_of(node)
        after = [self._raised(child) for child in before]
        if any(one is not other for one, other in zip(before, after, strict=True)):
            node = node.withNewChildren(self._seq(after))
        streams = [child for child in after if child.isStreaming()]
        if name_of(node) not in ("Generate", "Project", JOIN) or len(streams) != 1:
            return node
        filters, expand = [], streams[0]
        while name_of(expand) == "Filter" and name_of(node) != "Project":
            filters.append(expand)
            expand = children_of(expand)[0]
        if name_of(expand) != "Expand" or self._begins(expand, row := children_of(expand)[0]):
            return node
        above = self._copied_above if name_of(node) != "Project" else self._copied_at
        made = above(node, expand, row) if _is_deterministic(node) else None
        if made is None:
            return node
        for one in reversed(filters):
            made = one.withNewChildren(self._seq([made]))
        return made

    def _copied_above(self, node: Any, expand: Any, row: Any) -> Any:
        """What is made of the rows of another plan with the copies of a row, made of the row instead."""
        made = node.withNewChildren(self._seq([row if one.isStreaming() else one for one in children_of(node)]))
        if _ids(_used(node)) & _made(expand, row) or not _ids(_columns(row)) <= _ids(_columns(made)):
            return None
        projections = []
        for one in items(expand.projections()):
            given = dict(zip(map(_id, _columns(expand)), items(one), strict=True))
            projections.append(self._seq([given.get(_id(column), column) for column in _columns(node)]))
        return self._expand(projections, _columns(node), made)

    def _copied_at(self, project: Any, expand: Any, row: Any) -> Any:
        """A projection of copies as copies of a projection, if it takes what tells the copies apart as it is."""
        listed, of_copies = items(project.projectList()), _made(expand, row)
        meant = [one.child() if name_of(one) == "Alias" else one for one in listed]
        differ = [bool(_ids(_used(one)) & of_copies) for one in meant]
        if any(one and name_of(what) != "AttributeReference" for one, what in zip(differ, meant, strict=True)):
            return None
        computed = [one for one, it in zip(listed, differ, strict=True) if name_of(one) == "Alias" and not it]
        if computed:
            row = self._catalyst.plans.logical.Project(self._seq([*_columns(row), *computed]), row)
        output = [one.toAttribute() for one in listed]
        projections = []
        for one in items(expand.projections()):
            given = dict(zip(map(_id, _columns(expand)), items(one), strict=True))
            chosen = [
                given[_id(what)] if it else column for what, it, column in zip(meant, differ, output, strict=True)
            ]
            projections.append(self._seq(chosen))
        return self._expand(projections, output, row)

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

    def _object(self, package: Any, name: str) -> Any:
        """An object of Scala, with what its class does not show of it."""
        return getattr(getattr(package, f"{name}$"), "MODULE$")

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


def _made(expand: Any, row: Any) -> set[int]:
    """The columns in which the copies of a row differ."""
    return _ids(_columns(expand)) - _ids(_columns(row))


def _used(node: Any) -> list[Any]:
    return items(node.references().toSeq())


def _is_deterministic(node: Any) -> bool:
    return all(one.deterministic() for one in items(node.expressions()))


def _columns(plan: Any) -> list[Any]:
    return items(plan.output())


def _id(attribute: Any) -> int:
    return int(attribute.exprId().id())


def _ids(attributes: Iterable[Any]) -> set[int]:
    return set(map(_id, attributes))


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
