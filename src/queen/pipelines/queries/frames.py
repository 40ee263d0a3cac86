"""The DataFrames of a pipeline: of every source and step, and of the records that could not be used."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow
import pyarrow.compute
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession, functions
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import to_arrow_schema, to_arrow_type
from pyspark.sql.types import ArrayType, StringType, StructField, StructType

from queen.errors import SettingsError
from queen.pipelines.declaration import (
    WINDOW_TIME,
    Declaration,
    Dedup,
    Each,
    Frame,
    Join,
    Node,
    Source,
    SourceKind,
    Sql,
    Step,
    Window,
    WindowKind,
)
from queen.pipelines.errors import DeclarationError, PipelineError, Problem, Where, cause_of
from queen.pipelines.loading import line_in
from queen.pipelines.queries.late_rows import divert_late_rows
from queen.pipelines.queries.operators import stateful_operators
from queen.pipelines.queries.side_output import REASON, SideOutput
from queen.pipelines.session import Connection
from queen.spark.payloads import PayloadParser, as_struct, check_payload_schema
from queen.spark.schemas import CORRUPT_RECORD
from queen.wire.times import spark_interval


def read_table(spark: SparkSession, connection: Connection, table: str, queue: str | None = None) -> DataFrame:
    """Dead letters (`dlq`) or lags (`lag`) of all queues, or of one. They are read from PostgreSQL."""
    if not connection.databases:
        raise PipelineError("this is read from the PostgreSQL behind the server: give --database-url")
    reader = spark.read.format("queen").options(**connection.options()).option("table", table)
    return (reader.option("queue", json.dumps([queue])) if queue else reader).load()


ERROR: Final = "_error"
_LONGEST_ERROR: Final = 2000
# Arrow's own errors are kinds of these.
_CANNOT_HOLD: Final = (TypeError, ValueError, OverflowError)

Record = dict[str, Any]


def calling(
    function: Callable[[Record], Any], fields: Sequence[str], results: ArrayType
) -> Callable[[pyarrow.Array], pyarrow.Array]:
    """A function of an array of records: for each the list of what was made of it, or one result with an error."""
    names = frozenset(fields)

    def call_each(records: pyarrow.Array) -> pyarrow.Array:
        kind = to_arrow_type(results, timezone="UTC")
        made = [_made(function, names, record) for record in records.to_pylist()]
        try:
            return pyarrow.array(made, type=kind)
        except _CANNOT_HOLD:
            # One of them has a value that its column cannot hold; the others are not to suffer from it.
            return pyarrow.array([_holdable(one, kind) for one in made], type=kind)

    return call_each


def _made(function: Callable[[Record], Any], names: frozenset[str], record: Record) -> list[Record]:
    try:
        results = _listed(function(record))
        unknown = {key for result in results for key in result} - names
        if unknown:
            raise ValueError(f"the schema has no field {', '.join(sorted(map(repr, unknown)))}")
    except Exception as error:
        return _failed(error)
    return results


def _listed(given: Any) -> list[Record]:
    if given is None:
        return []
    results = list(given) if isinstance(given, list | tuple) else [given]
    for result in results:
        if not isinstance(result, dict):
            raise TypeError(f"the function must return a dict, a list of them or None, not {type(result).__name__}")
    return results


def _holdable(results: list[Record], kind: pyarrow.DataType) -> list[Record]:
    try:
        pyarrow.array([results], type=kind)
    except _CANNOT_HOLD as error:
        return _failed(error)
    return results


def _failed(error: Exception) -> list[Record]:
    return [{ERROR: f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]}]


_CORRUPT: Final = "_corrupt"
_PARSED: Final = "_parsed"
_RESULT: Final = "_result"
_ROWS_PER_BATCH: Final = "100000"

# What is known of the message a record came in, as columns of a source that has a schema.
_ORIGINS: Final = ("queue", "partition", "offset", "message_id", "transaction_id", "created_at")


class Frames:
    """Makes each DataFrame once. What is wrong with one raises `DeclarationError` with its place in the file."""

    def __init__(
        self,
        spark: SparkSession,
        declaration: Declaration,
        connection: Connection,
        *,
        moves_groups: bool = False,
        fail_on_data_loss: bool | None = None,
        given: Mapping[str, DataFrame] | None = None,
        judges: Container[str] | None = None,
        side: SideOutput | None = None,
    ) -> None:
        """`moves_groups`: the consumer groups of sources are moved along, which only one query may do.

        `fail_on_data_loss` is for all sources; None leaves it to each of them. `given`: a batch of what these nodes
        have `read` or computed, from which the others are made. `judges`: the nodes whose dead letters are wanted; None
        means all. `side`: where they and late rows leave a stream, instead of being counted among `dead_letters`.
        """
        self._fail_on_data_loss = fail_on_data_loss
        self._spark = spark
        self._moves_groups = moves_groups
        self._declaration = declaration
        self._connection = connection
        self._given = given
        self._judges = judges
        self._side = side
        self._made: dict[str, DataFrame] = {}
        self._bad: list[DataFrame] = []
        self._kept: list[DataFrame] = []
        self.judging: set[str] = set()
        """The nodes, among those made, that may have dead letters."""

    def of(self, name: str) -> DataFrame:
        """The rows of a source or step."""
        if name not in self._made:
            self._made[name] = self._make(self._node(name))
        return self._made[name]

    def raw(self, name: str) -> DataFrame:
        """The rows of a source before they are parsed, or of a step before they are held against its expectations."""
        if self._given is not None and name in self._given:
            return self._given[name]
        node = self._node(name)
        if isinstance(node, Source):
            return self._read(node)
        rows = self._step(node)
        if self._side is None:
            return rows
        return divert_late_rows(self._side, node.name, rows, [self.of(one) for one in node.inputs])

    def keeps_state(self, name: str) -> bool:
        """Whether a node looks at more than one row at a time, so that it cannot be computed batch by batch."""
        node = self._node(name)
        if isinstance(node, Source) or isinstance(node.action, Each):
            return False
        if isinstance(node.action, Window | Join | Dedup):
            return True
        return stateful_operators(self.of(name)) > sum(stateful_operators(self.of(one)) for one in node.inputs)

    def release(self) -> None:
        """A batch is done: forget what was kept of it."""
        for rows in self._kept:
            rows.unpersist()

    def _node(self, name: str) -> Node:
        node = self._declaration.node(name)
        assert node is not None
        return node

    def check_all(self) -> None:
        """Make all of them. Raises `DeclarationError` with the problems of all whose inputs are good."""
        problems: list[Problem] = []
        broken: set[str] = set()
        for node in self._declaration.nodes:
            if any(other.name in broken for other in self._declaration.upstream(node.name)):
                broken.add(node.name)
                continue
            try:
                self.of(node.name)
            except DeclarationError as error:
                problems += error.problems
                broken.add(node.name)
        if problems:
            raise DeclarationError(problems)

    def dead_letters(self) -> DataFrame | None:
        """Records that could not be used, with the reason; None where none can turn up."""
        if not self._bad:
            return None
        union = self._bad[0]
        for one in self._bad[1:]:
            union = union.unionByName(one)
        return union

    def _make(self, node: Node) -> DataFrame:
        try:
            rows = self.raw(node.name)
            if isinstance(node, Source) and node.schema is not None:
                rows = self._parsed(node, rows, node.schema)
            rows = self._expecting(node, rows)
            if node.event_time is not None and node.lateness is not None:
                rows = rows.withWatermark(node.event_time, spark_interval(node.lateness))
            return rows
        except DeclarationError:
            raise
        except PySparkException as error:
            raise DeclarationError([Problem(node.where, f"'{node.name}': {cause_of(error)}")]) from error
        except Exception as error:
            if not isinstance(node, Step) or not isinstance(node.action, Frame):
                raise
            file = Path(inspect.getfile(node.action.function))
            where = Where(file, line_in(file, error))
            raise DeclarationError(
                [Problem(where, f"step '{node.name}' failed: {type(error).__name__}: {error}")]
            ) from error

    def _read(self, source: Source) -> DataFrame:
        stream = self._spark.readStream
        if source.kind is SourceKind.RATE:
            return stream.format("rate").option("rowsPerSecond", source.target).load()
        if source.kind is SourceKind.FILES:
            stream = stream.format("text")
            if "files_per_batch" in source.options:
                stream = stream.option("maxFilesPerTrigger", source.options["files_per_batch"])
            lines = stream.load(source.target)
            return lines.select(functions.col("value").alias("payload"))
        stream = stream.format("queen").options(**self._connection.options())
        stream = stream.option("queue" if source.kind is SourceKind.QUEUE else "subscribePattern", source.target)
        stream = stream.option("startingOffsets", source.options.get("start", "earliest"))
        stream = stream.options(**_limits(source))
        fail = source.options.get("fail_on_data_loss")
        if self._fail_on_data_loss is not None:
            fail = str(self._fail_on_data_loss).lower()
        if fail is not None:
            stream = stream.option("failOnDataLoss", fail)
        if self._moves_groups and "group" in source.options:
            stream = stream.option("group", source.options["group"])
        if source.schema is not None and _is_parsed_by_arrow(source.schema):
            # The source parses as it reads, which saves a way from the JVM to Python and back.
            fields = StructType([StructField(field.name, field.dataType) for field in _struct(source.schema)])
            stream = stream.option("schema", fields.json()).option("parsedColumn", _PARSED)
        return stream.load()

    def _parsed(self, source: Source, payloads: DataFrame, ddl: str) -> DataFrame:
        schema = _struct(ddl)
        parsed = payloads
        if _PARSED not in payloads.columns:
            parsed = payloads.withColumn(_PARSED, _parse_column(schema))
            corrupt = functions.col(f"{_PARSED}.{_CORRUPT}").isNotNull() | functions.col(_PARSED).isNull()
        else:
            corrupt = functions.col(CORRUPT_RECORD).isNotNull()
        reason = functions.when(corrupt, functions.lit(f"the payload does not fit the schema {ddl}"))
        for field in schema.fields:
            if not field.nullable:
                missing = functions.col(f"{_PARSED}.`{field.name}`").isNull()
                reason = reason.when(missing, functions.lit(f"field '{field.name}' is missing"))
        parsed = parsed.withColumn(REASON, reason)
        if _PARSED not in payloads.columns:
            parsed = self._keep(parsed)
        parsed = self._good(source.name, parsed)
        fields = [functions.col(f"{_PARSED}.`{field.name}`").alias(field.name) for field in schema.fields]
        origins = [functions.col(name).alias(f"_{name}") for name in _ORIGINS if name in payloads.columns]
        return parsed.select(*fields, *origins)

    def _expecting(self, node: Node, rows: DataFrame) -> DataFrame:
        if not node.expect:
            return rows
        reasons = [
            functions.when(
                ~functions.coalesce(functions.expr(condition), functions.lit(False)),
                functions.lit(f"expectation '{name}' is not met: {condition}"),
            )
            for name, condition in node.expect.items()
        ]
        judged = rows.withColumn(REASON, functions.coalesce(*reasons))
        return self._good(node.name, judged).drop(REASON)

    def _step(self, step: Step) -> DataFrame:
        action = step.action
        if isinstance(action, Sql):
            for name in step.inputs:
                self.of(name).createOrReplaceTempView(name)
            return self._spark.sql(action.text)
        if isinstance(action, Frame):
            return self._called(step, action)
        if isinstance(action, Join):
            return self._joined(step, action)
        rows = self.of(step.inputs[0])
        if isinstance(action, Each):
            return self._each(step, action, rows)
        if isinstance(action, Dedup):
            time = self._declaration.event_time_of(step.inputs[0])
            columns = list(action.columns)
            if time is None:
                return rows.dropDuplicates(columns)
            return rows.dropDuplicatesWithinWatermark(columns)
        return self._windowed(step, action, rows)

    def _called(self, step: Step, action: Frame) -> DataFrame:
        parameters = list(inspect.signature(action.function).parameters)
        given: dict[str, Any] = {"spark": self._spark} if "spark" in parameters else {}
        wanted = [name for name in parameters if name != "spark"]
        # In YAML the file names the inputs, and the parameters may be called otherwise.
        given |= {name: self.of(taken) for name, taken in zip(wanted, step.inputs, strict=True)}
        rows = action.function(**given)
        if not isinstance(rows, DataFrame):
            text = f"step '{step.name}' must return a DataFrame, not {type(rows).__name__}"
            raise DeclarationError([Problem(step.where, text)])
        return rows

    def _each(self, step: Step, action: Each, rows: DataFrame) -> DataFrame:
        schema = _struct(action.schema)
        fields = [StructField(field.name, field.dataType) for field in schema.fields]
        kind = ArrayType(StructType([*fields, StructField(ERROR, StringType())]))
        # Its type stubs ask for a kind of function that it warns about when it is given.
        make: Any = arrow_udf
        call = make(calling(action.function, schema.names, kind), kind)
        own = functions.struct(*_own(rows))
        called = rows.withColumn(_RESULT, functions.explode(call(own))).withColumn(
            REASON, functions.col(f"{_RESULT}.{ERROR}")
        )
        called = self._good(step.name, self._keep(called))
        # The event time is passed on as it came: a new column would have no watermark.
        time = self._declaration.event_time_of(step.inputs[0])
        passed = [name for name in rows.columns if name.startswith("_") or name == time]
        made = [functions.col(f"{_RESULT}.`{name}`").alias(name) for name in schema.names if name != time]
        return called.select(*made, *passed)

    def _windowed(self, step: Step, action: Window, rows: DataFrame) -> DataFrame:
        time = self._declaration.event_time_of(step.inputs[0])
        assert time is not None
        if action.kind is WindowKind.SESSION:
            window = functions.session_window(time, spark_interval(action.size))
        else:
            slide = spark_interval(action.slide) if action.slide is not None else None
            window = functions.window(time, spark_interval(action.size), slide)
        aggregates = [functions.expr(text).alias(name) for name, text in action.aggregate.items()]
        grouped = rows.groupBy(window.alias("_window"), *action.by).agg(*aggregates)
        return grouped.select(
            functions.col("_window.start").alias("window_start"),
            functions.col("_window.end").alias("window_end"),
            *action.by,
            *action.aggregate,
            *_window_time(action.kind),
        )

    def _joined(self, step: Step, action: Join) -> DataFrame:
        left_name, right_name = step.inputs
        left, right = map(self.of, step.inputs)
        joined = left.alias(left_name).join(right.alias(right_name), functions.expr(action.on), action.how)
        columns = [functions.col(f"{left_name}.`{name}`").alias(name) for name in left.columns]
        if action.how != "left_semi":
            for name in _own(right):
                renamed = f"{right_name}_{name}" if name in left.columns else name
                columns.append(functions.col(f"{right_name}.`{name}`").alias(renamed))
        return joined.select(*columns)

    def _good(self, node: str, judged: DataFrame) -> DataFrame:
        """The rows that have no reason to be dead letters."""
        self.judging.add(node)
        if self._judges is None or node in self._judges:
            if self._side is not None:
                return self._side.divert(node, judged)
            bad = judged.where(functions.col(REASON).isNotNull())
            self._bad.append(letters(self._declaration.name, node, bad))
        return judged.where(functions.col(REASON).isNull())

    def _keep(self, rows: DataFrame) -> DataFrame:
        """What takes long is computed once for a batch, however many need it."""
        if self._given is None:
            return rows
        self._kept.append(rows.persist())
        return rows


def letters(pipeline: str, node: str, bad: DataFrame) -> DataFrame:
    """Dead letters of rows with the reason why they are."""

    def origin(name: str, kind: str) -> Column:
        for column in (f"_{name}", name):
            if column in bad.columns:
                return functions.col(column).cast(kind).alias(name)
        return functions.lit(None).cast(kind).alias(name)

    # What has not been parsed is kept as it came.
    record = functions.col("payload") if _PARSED in bad.columns else functions.to_json(functions.struct(*_own(bad)))
    return bad.select(
        functions.lit(pipeline).alias("pipeline"),
        functions.lit(node).alias("step"),
        functions.col(REASON).alias("error"),
        record.cast("string").alias("record"),
        origin("queue", "string"),
        origin("partition", "string"),
        origin("offset", "long"),
        origin("transaction_id", "string"),
    )


def _limits(source: Source) -> dict[str, str]:
    """The options that say how much a batch of a source reads, and how hard it works at it."""
    given = source.options
    # A minimum that is configured wins over the usual limit.
    most = given.get("rows_per_batch") or str(max(int(_ROWS_PER_BATCH), int(given.get("min_rows_per_batch", 0))))
    named = {
        "minOffsetsPerTrigger": "min_rows_per_batch",
        "minBytesPerTrigger": "min_bytes_per_batch",
        "maxTriggerDelay": "max_delay",
        "maxBytesPerTrigger": "bytes_per_batch",
        "maxReadShare": "max_read_share",
        "maxTasks": "max_tasks",
    }
    return {"maxRowsPerBatch": most} | {option: given[key] for option, key in named.items() if key in given}


def _is_parsed_by_arrow(ddl: str) -> bool:
    """Maps, variants and intervals are parsed by Spark."""
    try:
        arrow_schema(_struct(ddl))
    except (SettingsError, PySparkException):
        return False
    return True


def arrow_schema(schema: StructType) -> pyarrow.Schema:
    """The schema as the parser of payloads takes it. Raises `SettingsError` when it does not."""
    nullable = StructType([StructField(field.name, field.dataType) for field in schema])
    found = to_arrow_schema(nullable, timezone="UTC")
    check_payload_schema(found)
    return found


def _parse_column(schema: StructType) -> Column:
    """The column `payload` parsed as the source parses it: a struct of the fields, and of what does not fit."""
    with_corrupt = StructType([*schema.fields, StructField(_CORRUPT, StringType())])
    try:
        fields = arrow_schema(schema)
    except SettingsError:
        options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
        return functions.from_json("payload", with_corrupt, options)
    kind = StructType([StructField(field.name, field.dataType) for field in with_corrupt])

    def parse(payloads: pyarrow.Array) -> pyarrow.Array:
        texts = pyarrow.compute.fill_null(payloads, "")
        table, unfit = PayloadParser(fields).parse(texts, lambda index, why: None)
        corrupt = pyarrow.compute.if_else(pyarrow.array(unfit), texts, pyarrow.scalar(None, pyarrow.string()))
        return as_struct(table.append_column(_CORRUPT, corrupt))

    make: Any = arrow_udf
    column: Column = make(parse, kind)("payload")
    return column


def _struct(ddl: str) -> StructType:
    schema = StructType.fromDDL(ddl)
    assert isinstance(schema, StructType)
    return schema


def _own(rows: DataFrame) -> list[str]:
    """Its columns without those that are the pipeline's."""
    return [name for name in rows.columns if not name.startswith("_")]


def _window_time(kind: WindowKind) -> list[Column]:
    if kind is WindowKind.SESSION:
        return [functions.col("_window.end").alias(WINDOW_TIME)]
    return [functions.window_time("_window").alias(WINDOW_TIME)]
