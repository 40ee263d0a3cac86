"""One Spark for all tests, started once; it is slow to start and takes half a gigabyte."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, DataFrameReader, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from queen.embedded import EmbeddedPostgres
from queen.pipelines.session import LOCAL_CHECKPOINTS
from tests.support.databases import fresh_database

T = TypeVar("T")
HERE = Path(__file__).parent
_SECONDS = 400
TOO_SLOW = "failed to connect back"
"""Spark gives the process of a source ten seconds to start, which a busy machine may not: nothing was read then."""
MASTER = "QUEEN_TEST_SPARK_MASTER"
"""The variable that names the cluster on which the tests run, instead of on this process's own Spark."""
SETTINGS = {
    "spark.driver.memory": "640m",
    # Tests are short: what the second compiler would gain, they do not live to see.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    # Nor need the classes of Spark be verified, which takes a tenth of the time of its start.
    " -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote",
    "spark.executor.memory": "512m",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # A few rows are interpreted in less time than it takes to compile Java for them.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    **LOCAL_CHECKPOINTS,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They get the time that a JVM takes on a busy machine."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_SECONDS))


@pytest.fixture(scope="session")
def spark_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where Spark keeps its files; with them ends the one Spark that all tests share."""
    yield tmp_path_factory.mktemp("spark")
    _stop()


@pytest.fixture
def spark(spark_directory: Path) -> Iterator[SparkSession]:
    """A session on two cores, whose tasks are tried twice: the one that runs, or a new one where that has died."""
    needs_java()
    if not is_alive():
        _stop()
    # Executors of a cluster are not where the daemon is.
    os.environ["PYSPARK_PYTHON"] = sys.executable if MASTER in os.environ else str(_python(spark_directory))
    builder = SparkSession.builder.master(os.environ.get(MASTER, "local[2,2]")).appName("queen tests")
    settings = SETTINGS | {
        "spark.sql.warehouse.dir": str(spark_directory / "warehouse"),
        "spark.local.dir": str(spark_directory / "local"),
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    # Queries of a test that failed would take the processors from the next, and be counted among its own.
    for query in session.streams.active if is_alive() else ():
        query.stop()


def _python(directory: Path) -> Path:
    """The interpreter for Spark's processes, which starts our daemon in place of PySpark's."""
    path = directory / "python"
    python, root = shlex.quote(sys.executable), shlex.quote(str(HERE.parents[1]))
    if not path.exists():
        path.write_text(
            "#!/bin/sh\n"
            'if [ "$2" = pyspark.daemon ]; then\n'
            "  shift 2\n"
            f'  PYTHONPATH="$PYTHONPATH":{root} exec {python} -m tests.spark.daemon "$@"\n'
            "fi\n"
            f'exec {python} "$@"\n'
        )
        path.chmod(0o755)
    return path


def is_alive() -> bool:
    """Whether the shared Spark runs: its JVM may have been killed, or run out of memory."""
    gateway, context = SparkContext._gateway, SparkContext._active_spark_context
    if gateway is None or context is None or gateway.proc.poll() is not None:
        return False
    try:
        return not context._jsc.sc().isStopped()
    except (Py4JError, OSError):
        return False


def _stop() -> None:
    """End the shared Spark, if there is one. PySpark holds on to one that died: that has to be forgotten for it."""
    session, gateway = SparkSession._instantiatedSession, SparkContext._gateway
    if session is None or gateway is None:
        return
    answers = is_alive()
    with contextlib.suppress(Py4JError, OSError):
        session.stop()
    if not answers:
        gateway.proc.kill()
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = SparkSession._activeSession = None


@pytest.fixture
async def dsn(postgres: EmbeddedPostgres) -> AsyncIterator[str]:
    """A new database: Spark's processes outlive a test, and know the queues of its database by their numbers."""
    async with fresh_database(postgres, used=False) as dsn:
        yield dsn


@pytest.fixture
def read(spark: SparkSession, dsn: str) -> Read:
    """Reads queues of the test's database."""
    return Read(spark, dsn)


class Read:
    """`read("orders", startingOffsets="earliest")` is a batch, `read.stream("orders")` a stream."""

    def __init__(self, spark: SparkSession, dsn: str) -> None:
        self.spark = spark
        self.dsn = dsn

    def __call__(self, queue: str | None = None, **options: str) -> DataFrame:
        return self.frame(queue, **options).load()

    def frame(self, queue: str | None = None, **options: str) -> DataFrameReader:
        return self.spark.read.format("queen").options(**self._options(queue, options))

    def stream(self, queue: str, **options: str) -> DataFrame:
        return self.spark.readStream.format("queen").options(**self._options(queue, options)).load()

    def _options(self, queue: str | None, options: dict[str, str]) -> dict[str, str]:
        named = {} if queue is None else {"queue": queue}
        return {"databaseUrls": self.dsn} | named | options


async def in_thread(spark: SparkSession, work: Callable[[], T]) -> T:
    """Spark works in another thread, so that the test's server goes on working."""

    def run() -> T:
        # To make a frame makes the session this thread's own, without which a write does not find the format.
        spark.createDataFrame([(0,)], "n int")
        return work()

    return await asyncio.to_thread(run)


async def collect(frame: Callable[[], DataFrame]) -> list[Row]:
    """The rows of a frame. Spark works in another thread, so that the test's server goes on working."""
    return await asyncio.to_thread(lambda: frame().collect())


async def drain(stream: DataFrame, checkpoint: Path) -> list[Row]:
    """Everything that a stream has now, as its checkpoint remembers where it was; batches in order."""
    rows: list[Row] = []
    await asyncio.to_thread(_drain, stream, checkpoint, rows)
    return rows


def _drain(stream: DataFrame, checkpoint: Path, rows: list[Row]) -> None:
    writer = stream.writeStream.foreachBatch(lambda batch, _: rows.extend(batch.collect()))
    run_to_end(writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start)


def run_to_end(start: Callable[[], StreamingQuery], attempts: int = 15) -> list[int]:
    """Run a query that ends by itself, again where its source did not start in time; the numbers of its batches."""
    batches: list[int] = []
    while True:
        query = start()
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            attempts -= 1
            if not attempts or TOO_SLOW not in str(error):
                raise
        batches += [progress.batchId for progress in query.recentProgress]
        if query.exception() is None:
            return batches


def needs_java() -> None:
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Spark needs Java 17 or newer, and there is no java on the PATH")
