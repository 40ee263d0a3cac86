"""How fast Spark reads queues: into nothing, into Parquet, in small batches; beside the same messages as plain rows.

    python -m bench.spark [--messages 1000000] [--partitions 8] [--cores 2] [--segment 1000]
        [--jdbc-jar /usr/share/java/postgresql.jar]

Spark, its Python workers and PostgreSQL share the machine: figures are for comparing with each other, in one run. The
plain rows (one row per message, the columns that a read gives) are read through Spark's JDBC source when there is the
driver (Debian: libpostgresql-jdbc-java), else by a Python source that fetches rows with psycopg; which, is printed.
`--segment 1` is the worst case: messages that were pushed one by one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import ArrayType, DoubleType, LongType, StringType, StructType, TimestampType

from queen.embedded import EmbeddedPostgres
from queen.spark.options import parse_read_options
from queen.spark.schemas import MESSAGES, schema_of
from queen.spark.source.batch import QueenReader
from queen.storage.migrate import migrate
from queen.wire.envelope import Envelope
from queen.wire.ids import IdSource
from queen.wire.segment import pack_segment

QUEUE = "bench"
_WARM_UP = 2
TRICKLE = "trickle"
DRIVER_JAR = Path("/usr/share/java/postgresql.jar")
PAYLOAD = (
    StructType()
    .add("id", LongType())
    .add("customer", StringType())
    .add("amount", DoubleType())
    .add("tags", ArrayType(StringType()))
    .add("at", TimestampType())
)


@dataclass(frozen=True)
class Setting:
    """What is measured on."""

    dsn: str
    jdbc: str
    messages: int
    partitions: int
    cores: int
    jar: Path | None
    segment: int = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--partitions", type=int, default=8)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--segment", type=int, default=1000, help="messages in each segment")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--jdbc-jar", type=Path, default=DRIVER_JAR)
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="queen-bench-spark-"))
    try:
        with _database(directory) as (dsn, jdbc):
            setting = Setting(
                dsn,
                jdbc,
                arguments.messages,
                arguments.partitions,
                arguments.cores,
                arguments.jdbc_jar if arguments.jdbc_jar.exists() else None,
                arguments.segment,
            )
            _fill(setting)
            _measure_decoding(setting)
            _measure_spark(setting, directory, arguments.repeat, arguments.batches)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _database(directory: Path) -> Iterator[tuple[str, str]]:
    """A fresh PostgreSQL: its DSN, and its URL for JDBC with a role of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    password = secrets.token_hex(8)
    # PostgreSQL does not run as root, and its account has to pass through here.
    directory.chmod(0o755)
    with EmbeddedPostgres(directory / "pg", port=port) as server:
        dsn = server.dsn()
        asyncio.run(migrate(dsn))
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE bench LOGIN SUPERUSER PASSWORD '{password}'")
        yield dsn, f"jdbc:postgresql://127.0.0.1:{port}/postgres?user=bench&password={password}"


def _fill_queue(connection: psycopg.Connection[Any], setting: Setting) -> None:
    """The messages that are read."""
    each = setting.messages // setting.partitions
    queue = _make_queue(connection, QUEUE)
    for number in range(setting.partitions):
        partition = _make_partition(connection, queue, f"p{number}", each)
        with connection.cursor().copy(
            "COPY queen.segments (partition_id, base_offset, count, created_at, ids, body) FROM STDIN"
        ) as copy:
            for base in range(0, each, setting.segment):
                copy.write_row(_segment(partition, base, min(setting.segment, each - base)))


def _fill(setting: Setting) -> None:
    """The messages, in segments and as plain rows; and a queue for what trickles in."""
    with psycopg.connect(setting.dsn, autocommit=True) as connection:
        _make_partition(connection, _make_queue(connection, TRICKLE), "Default", 0)
        _fill_queue(connection, setting)
        connection.execute("CREATE TABLE plain_rows (" + _plain_columns() + ")")
    reader = _reader(setting)
    with psycopg.connect(setting.dsn, autocommit=True) as connection:
        for number, task in enumerate(reader.partitions()):
            with connection.cursor().copy("COPY plain_rows FROM STDIN") as copy:
                for batch in reader.read(task):
                    for row in batch.to_pylist():
                        copy.write_row((number, *row.values()))
        connection.execute("VACUUM ANALYZE plain_rows")
        connection.execute("VACUUM ANALYZE queen.segments")


def _plain_columns() -> str:
    types = {"string": "text", "bigint": "bigint", "timestamp": "timestamptz"}
    return "part integer, " + ", ".join(
        f'"{field.name}" {types[field.dataType.simpleString()]}' for field in MESSAGES.fields
    )


def _make_queue(connection: psycopg.Connection[Any], name: str) -> int:
    return _one(connection.execute("INSERT INTO queen.queues (name) VALUES (%s) RETURNING id", (name,)).fetchone())


def _make_partition(connection: psycopg.Connection[Any], queue: int, name: str, messages: int) -> int:
    statement = (
        "INSERT INTO queen.partitions (queue_id, name, next_offset, last_at) VALUES (%s, %s, %s, now()) RETURNING id"
    )
    return _one(connection.execute(statement, (queue, name, messages)).fetchone())


def _one(row: Any) -> int:
    return int(row[0])


def _segment(partition: int, base: int, count: int) -> tuple[Any, ...]:
    ids = IdSource()
    payloads = [_payload(base + index) for index in range(count)]
    transactions = [b'"%b"' % ids.uuid().encode() for _ in range(count)]
    body = Envelope().seal(pack_segment(transactions, payloads))
    return partition, base, count, "2026-01-01T00:00:00Z", ids.block(count).pack() + bytes(8 * count), body


def _payload(number: int) -> bytes:
    noise = secrets.token_hex(30).encode()
    return b'{"id":%d,"customer":"c%06d","amount":%d.25,"note":"%b","tags":["a","b"],"at":"2026-01-01T00:00:00Z"}' % (
        number,
        number * 7919 % 1_000_000,
        number % 500,
        noise,
    )


def _measure_decoding(setting: Setting) -> None:
    """What this process spends on a message, without Spark."""
    for name, options in (("decode", {}), ("decode + schema", {"schema": PAYLOAD.json()})):
        reader = _reader(setting, **options)
        tasks = reader.partitions()
        began, clock = time.process_time(), time.monotonic()
        rows = sum(batch.num_rows for task in tasks for batch in reader.read(task))
        cpu, wall = time.process_time() - began, time.monotonic() - clock
        print(f"{name:<28} {cpu / rows * 1e6:8.2f} us of CPU a row   {rows / wall:12,.0f} rows/s in one process")


def _reader(setting: Setting, **more: str) -> QueenReader:
    options = parse_read_options({"queue": QUEUE, "databaseUrls": setting.dsn} | more, {})
    schema = schema_of(options)
    assert isinstance(schema, StructType)
    return QueenReader(options, schema)


def _measure_spark(setting: Setting, directory: Path, repeat: int, batches: int) -> None:
    spark = _session(setting)
    try:
        queue = spark.read.format("queen").option("queue", QUEUE).option("databaseUrls", setting.dsn)
        queue = queue.option("maxTasks", setting.cores)
        plain = _plain(spark, setting)
        sinks: list[tuple[str, Callable[[], DataFrame], str]] = [
            ("queue -> noop", queue.load, "noop"),
            ("plain rows -> noop", plain, "noop"),
            ("queue -> parquet", queue.load, "parquet"),
            ("plain rows -> parquet", plain, "parquet"),
            ("queue, parsed -> noop", lambda: queue.option("schema", PAYLOAD.json()).load(), "noop"),
        ]
        rates: dict[str, float] = {}
        for name, frame, sink in sinks:
            # The first runs are the compiler's.
            for _ in range(_WARM_UP):
                _run(frame(), sink, directory / "out")
            before = _cpu_seconds(directory)
            seconds = [_run(frame(), sink, directory / "out") for _ in range(repeat)]
            cost = (_cpu_seconds(directory) - before) / repeat / setting.messages * 1e6
            rates[name] = setting.messages / statistics.median(seconds)
            print(
                f"{name:<28} {rates[name]:12,.0f} rows/s   {cost:6.2f} us of CPU a row, PostgreSQL's included",
                flush=True,
            )
        print(f"queue over plain rows: {rates['queue -> noop'] / rates['plain rows -> noop']:.2f} into noop,")
        print(f"                       {rates['queue -> parquet'] / rates['plain rows -> parquet']:.2f} into parquet")
        _measure_batches(spark, setting, directory / "checkpoint", batches)
    finally:
        spark.stop()


def _session(setting: Setting) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(f"local[{setting.cores}]").appName("queen bench")
    settings = {
        "spark.driver.memory": "768m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
    }
    if setting.jar is not None:
        settings["spark.jars"] = str(setting.jar)
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def _plain(spark: SparkSession, setting: Setting) -> Callable[[], DataFrame]:
    if setting.jar is not None:
        print("plain rows are read through JDBC")
        reader = spark.read.format("jdbc").option("url", setting.jdbc).option("dbtable", "plain_rows")
        reader = reader.option("driver", "org.postgresql.Driver")
        reader = reader.option("partitionColumn", "part").option("lowerBound", 0).option("upperBound", setting.cores)
        reader = reader.option("numPartitions", setting.cores).option("fetchsize", 10_000)
        return lambda: reader.load().drop("part")
    print("plain rows are read by a Python source with psycopg: the JDBC driver is not here")
    spark.dataSource.register(PlainRows)
    return spark.read.format("plain_rows").option("dsn", setting.dsn).option("parts", setting.cores).load


class PlainRows(DataSource):
    """Rows of a table, one Python tuple each."""

    @classmethod
    def name(cls) -> str:
        return "plain_rows"

    def schema(self) -> StructType:
        return MESSAGES

    def reader(self, schema: StructType) -> DataSourceReader:
        return PlainReader(self.options["dsn"], int(self.options["parts"]))


class PlainReader(DataSourceReader):
    def __init__(self, dsn: str, parts: int) -> None:
        self._dsn = dsn
        self._parts = parts

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self._parts)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        columns = ", ".join(f'"{name}"' for name in MESSAGES.fieldNames())
        with psycopg.connect(self._dsn) as connection, connection.cursor("rows", binary=True) as cursor:
            cursor.itersize = 10_000
            cursor.execute(f"SELECT {columns} FROM plain_rows WHERE part = %s", (partition.value,))
            yield from cursor


def _cpu_seconds(directory: Path) -> float:
    """What Spark, its Python workers and PostgreSQL have used: on a busy machine it says more than the clock."""
    (pid_file,) = directory.rglob("postmaster.pid")
    roots = psutil.Process(), psutil.Process(int(pid_file.read_text().split()[0]))
    used = 0.0
    for root in roots:
        for process in (root, *root.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            used += times.user + times.system + times.children_user + times.children_system
    return used


def _run(frame: DataFrame, sink: str, directory: Path) -> float:
    began = time.monotonic()
    frame.write.format(sink).mode("overwrite").save(str(directory) if sink == "parquet" else None)
    return time.monotonic() - began


def _measure_batches(spark: SparkSession, setting: Setting, checkpoint: Path, batches: int) -> None:
    """How long a micro-batch takes that has next to nothing to do."""
    stream = spark.readStream.format("queen").option("queue", TRICKLE).option("databaseUrls", setting.dsn).load()
    query = stream.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    stopping = threading.Event()
    feeder = threading.Thread(target=_feed, args=(setting.dsn, stopping))
    feeder.start()
    durations: dict[int, int] = {}
    try:
        while len(durations) < batches + 5:
            time.sleep(0.2)
            if query.exception() is not None:
                raise RuntimeError(str(query.exception()))
            for progress in query.recentProgress:
                if progress.numInputRows:
                    durations[progress.batchId] = progress.durationMs["triggerExecution"]
    finally:
        stopping.set()
        feeder.join()
        query.stop()
    settled = [durations[number] for number in sorted(durations)[5:]]
    print(f"micro-batch floor            {statistics.median(settled):8.0f} ms, best {min(settled)} ms")


def _feed(dsn: str, stopping: threading.Event) -> None:
    """A message now and then, so that each is a batch of its own."""
    with psycopg.connect(dsn) as connection:
        found = connection.execute(
            "SELECT p.id FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = %s", (TRICKLE,)
        ).fetchone()
        partition, offset = _one(found), 0
        while not stopping.wait(0.6):
            connection.execute(
                "INSERT INTO queen.segments (partition_id, base_offset, count, created_at, ids, body)"
                " VALUES (%s, %s, %s, %s, %s, %s)",
                _segment(partition, offset, 1),
            )
            offset += 1
            connection.execute("UPDATE queen.partitions SET next_offset = %s WHERE id = %s", (offset, partition))
            connection.commit()


if __name__ == "__main__":
    main()
