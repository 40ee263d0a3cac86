"""`queen pipeline replay`: messages of an archive back to a queue, in order, at a chosen speed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import functions

from queen.client.sync import QueenSync
from queen.pipelines.archive_files import ArchiveView, Selection, reading
from queen.pipelines.errors import PipelineError, cause_of
from queen.pipelines.session import Connection
from queen.pipelines.tables.table import AsOf
from queen.wire.pipelines import PipelineState, PipelineStatus, QueryStatus, write_status

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_PUSHED_AT_ONCE: Final = 1000
# Messages may be so large that few of them are what a server takes in a request (MAX_BODY_BYTES).
_PUSHED_CHARACTERS: Final = 4 << 20
# With a speed, messages of so many seconds go together.
_STRETCH_SECONDS: Final = 0.25
_REPORT_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Which messages, where to, and how fast. `speed`: 1 as they came, 10 ten times as fast, None as fast as can be."""

    root: str | Path
    queues: tuple[str, ...] = ()
    to: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    condition: str | None = None
    speed: float | None = None
    new_ids: bool = False
    keep_producers: bool = True
    as_of: AsOf = None
    catalog: str | None = None

    @property
    def selection(self) -> Selection:
        return Selection(self.queues, self.since, self.until)


@dataclass(slots=True)
class Replayed:
    """What became of the messages. `duplicates` were in the queue already."""

    queued: int = 0
    duplicates: int = 0
    queues: set[str] = field(default_factory=set)


class ReplayReport:
    """The status of a replay, as pipelines have one: the dashboard and `queen pipeline list` show how far it is."""

    def __init__(self, directory: Path, options: ReplayOptions, master: str, total: int) -> None:
        now = time.time()
        self._directory = directory
        self._total = total
        self._query = QueryStatus(name=options.to or "the queues they came from", sink="push", lag=total)
        self._status = PipelineStatus(
            name=directory.name,
            state=PipelineState.RUNNING,
            pid=os.getpid(),
            file=str(options.root),
            master=master,
            started_at=now,
            updated_at=now,
            queries=[self._query],
        )
        write_status(directory, self._status)

    def note(self, done: Replayed) -> None:
        """Say how far it is, at most once a second."""
        if time.time() - self._status.updated_at >= _REPORT_SECONDS:
            self._write(done)

    def end(self, done: Replayed, error: str | None = None) -> None:
        self._status.state = PipelineState.DONE if error is None else PipelineState.FAILED
        self._status.error = error
        self._write(done)

    def _write(self, done: Replayed) -> None:
        query, status = self._query, self._status
        status.updated_at = time.time()
        query.rows, query.written = done.queued + done.duplicates, done.queued
        query.lag = max(0, self._total - query.rows)
        query.rows_per_second = round(query.rows / max(0.001, status.updated_at - status.started_at), 1)
        write_status(self._directory, status)


def select(spark: SparkSession, options: ReplayOptions, view: ArchiveView) -> DataFrame:
    """The messages that are to be replayed, oldest first."""
    rows = view.rows(spark, options.selection)
    if options.since is not None:
        rows = rows.where(functions.col("created_at") >= functions.lit(options.since))
    if options.until is not None:
        rows = rows.where(functions.col("created_at") < functions.lit(options.until))
    if options.condition is not None:
        try:
            rows = rows.where(options.condition)
        except PySparkException as error:
            raise PipelineError(f"--filter {options.condition}: {cause_of(error)}") from error
    return rows.orderBy("created_at", "queue", "partition", "offset")


def replay(
    spark: SparkSession,
    connection: Connection,
    options: ReplayOptions,
    on_progress: Callable[[Replayed], None] = lambda done: None,
) -> Replayed:
    """Push the messages again, with the transaction ids they had, so that doing it twice changes nothing."""
    done = Replayed()
    client = QueenSync(connection.server, bearer_token=connection.token)
    with reading(options.root, options.as_of, options.catalog) as view, client as queen:
        rows = select(spark, options, view).toLocalIterator(prefetchPartitions=True)
        for chunk in _paced(rows, options.speed, by_producer=options.keep_producers):
            items = [_item(row, options) for row in chunk]
            path = "/api/v1/push"
            if options.keep_producers and chunk[0]["producer_sub"]:
                path += f"?producerSub={quote(chunk[0]['producer_sub'], safe='')}"
            for item, result in zip(items, queen.request("POST", path, {"items": items}), strict=True):
                if result["status"] not in ("queued", "duplicate", "buffered"):
                    raise PipelineError(
                        f"{item['queue']}/{item['partition']}: {result.get('error') or result['status']};"
                        f" {done.queued} messages were replayed before, and running it again skips them"
                    )
                done.duplicates += result["status"] == "duplicate"
                done.queued += result["status"] != "duplicate"
                done.queues.add(item["queue"])
            on_progress(done)
    return done


def _item(row: Row, options: ReplayOptions) -> dict[str, Any]:
    item: dict[str, Any] = {
        "queue": options.to or row["queue"],
        "partition": row["partition"],
        # The payload goes as it was stored, byte for byte.
        "payload": msgspec.Raw(row["payload"].encode()),
    }
    if not options.new_ids:
        item["transactionId"] = row["transaction_id"]
    if row["trace_id"]:
        item["traceId"] = row["trace_id"]
    return item


def _paced(rows: Iterator[Row], speed: float | None, *, by_producer: bool) -> Iterator[list[Row]]:
    """Chunks of rows, each when its time has come; `by_producer`: of one producer each."""
    chunk: list[Row] = []
    size = 0
    began, first = time.monotonic(), None
    for row in rows:
        moment = row["created_at"].timestamp()
        first = moment if first is None else first
        full = len(chunk) >= _PUSHED_AT_ONCE or size + len(row["payload"]) > _PUSHED_CHARACTERS
        full |= by_producer and bool(chunk) and chunk[0]["producer_sub"] != row["producer_sub"]
        if speed is not None and chunk:
            full |= (moment - chunk[0]["created_at"].timestamp()) / speed > _STRETCH_SECONDS
        if full and chunk:
            yield chunk
            chunk, size = [], 0
        if speed is not None and not chunk:
            time.sleep(max(0.0, began + (moment - first) / speed - time.monotonic()))
        chunk.append(row)
        size += len(row["payload"])
    if chunk:
        yield chunk
