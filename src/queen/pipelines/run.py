"""Runs a pipeline: starts its queries, restarts those that fail for a transient reason, reports their progress."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException

from queen.errors import QueenError
from queen.pipelines.declaration import Declaration, Sink
from queen.pipelines.errors import DeclarationError, PipelineError, Problem, cause_of
from queen.pipelines.queries.fan_out import Starter
from queen.pipelines.queries.planning import DEAD_LETTERS, PlannedQuery, dead_letter_sink, plan
from queen.pipelines.queries.progress import QueryWatch, QueueEnds
from queen.pipelines.session import Connection
from queen.pipelines.state import StateDirectory, drop_checkpoints, drop_checksums
from queen.wire.pipelines import PipelineState, PipelineStatus, QueryStatus, write_status

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.25
_BEGIN_SECONDS: Final = 0.05
_HOUSEKEEPING_SECONDS: Final = 300.0
_REMEDIES: Final = {
    "failOnDataLoss": "Here: --no-fail-on-data-loss, or fail_on_data_loss: false for the source",
    "Python worker to connect back": "Spark waits 10 s for it, and this machine is too busy: run the pipeline again"
    " when it is less so; it goes on where it was",
}
"""Advice for some causes, by a part of their text."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a command says of a run, over what the file says."""

    file: Path | str
    master: str
    trigger: str | None = None
    fresh: bool = False
    fail_on_data_loss: bool | None = None
    """For all sources; None leaves it to each of them."""
    checkpoints: Path | None = None
    """Where they are, if not in the state directory."""
    housekeeping: Callable[[], object] | None = None
    """Run every few minutes, and when everything is done."""


class Run:
    """One run of a pipeline. Setting `stop` ends it.

    `on_plan` is called with every sink and the rows it gets before any is started, `on_status` at every change.
    """

    def __init__(
        self,
        declaration: Declaration,
        connection: Connection,
        state: StateDirectory,
        options: RunOptions,
        on_status: Callable[[PipelineStatus], None] = lambda status: None,
        on_plan: Callable[[list[tuple[Sink, DataFrame]]], None] = lambda planned: None,
    ) -> None:
        self._declaration = declaration
        self._connection = connection
        self._state = state
        self._options = options
        self._on_status = on_status
        self._on_plan = on_plan
        self.stop = threading.Event()
        self._watches: list[QueryWatch] = []

    def run(self, open_session: Callable[[], SparkSession]) -> PipelineStatus:
        """Until it is done, stopped or failed; a failure is raised after everything else was stopped."""
        name = self._declaration.name
        with self._state.running(name) as directory:
            self._directory = directory
            self._status = self._first_status()
            self._report(PipelineState.STARTING)
            try:
                if self._options.fresh:
                    drop_checkpoints(self._options.checkpoints or self._state.checkpoints(name))
                self._start(open_session())
                self._watch()
            except BaseException as error:
                self._end(PipelineState.FAILED, str(error))
                raise
            self._end(PipelineState.STOPPED if self.stop.is_set() else PipelineState.DONE, None)
            return self._status

    def _start(self, spark: SparkSession) -> None:
        checkpoints = self._options.checkpoints or self._state.checkpoints(self._declaration.name)
        planned = plan(spark, self._declaration, self._connection, self._options.fail_on_data_loss, checkpoints)
        self._on_plan(planned.rows)
        planned.save(checkpoints)
        drop_checksums(checkpoints)
        trigger = self._options.trigger or self._declaration.trigger
        starter = Starter(self._declaration, self._connection, checkpoints, trigger)
        for query in planned.queries:
            if self.stop.is_set():
                return
            watch = self._watched(starter, query)
            self._watches.append(watch)
            # One after the other: each starts a process, which must answer Spark within ten seconds.
            while watch.beginning and not self.stop.wait(_BEGIN_SECONDS):
                pass

    def _watched(self, starter: Starter, query: PlannedQuery) -> QueryWatch:
        fan_out = starter.fan_out(query)
        sinks = [QueryStatus(name=sink.name, sink=str(sink), sources=self._sources_of(sink)) for sink in query.sinks]
        try:
            return QueryWatch(query.name, sinks, fan_out, partial(starter.start, query, fan_out))
        except PySparkException as error:
            names = ", ".join(f"'{sink.name}'" for sink in query.sinks)
            raise DeclarationError([Problem(query.sinks[0].where, f"sink {names}: {cause_of(error)}")]) from error

    def _sources_of(self, sink: Sink) -> list[str]:
        sources = {source.name for source in self._declaration.sources}
        return sorted(node.name for node in self._declaration.upstream(sink.source) if node.name in sources)

    def _watch(self) -> None:
        next_time = time.monotonic() + _HOUSEKEEPING_SECONDS
        queue_ends = QueueEnds(self._declaration, self._connection)
        while not self.stop.is_set():
            ends = queue_ends.look()
            running = [watch for watch in self._watches if watch.active]
            failures: dict[str, str] = {}
            for watch in self._watches:
                watch.look(ends)
                failure = watch.restart_if_needed()
                if failure is not None:
                    failures |= dict.fromkeys(watch.failed_sinks, failure)
            self._report(PipelineState.RUNNING)
            if failures:
                self._stop_all()
                raise PipelineError(describe_failures(failures))
            if not running and not any(watch.active for watch in self._watches):
                self._run_housekeeping()
                return
            if time.monotonic() > next_time:
                self._run_housekeeping()
                next_time = time.monotonic() + _HOUSEKEEPING_SECONDS
            self.stop.wait(_LOOK_SECONDS)
        self._stop_all()

    def _stop_all(self) -> None:
        for watch in self._watches:
            watch.stop()

    def _run_housekeeping(self) -> None:
        if self._options.housekeeping is None:
            return
        try:
            self._options.housekeeping()
        except QueenError as error:
            # It is done the next time.
            log.warning("housekeeping failed: %s", error)

    def _end(self, state: PipelineState, error: str | None) -> None:
        self._stop_all()
        for watch in self._watches:
            watch.look(None)
        self._status.error = error
        self._report(state)

    def _first_status(self) -> PipelineStatus:
        now = time.time()
        return PipelineStatus(
            name=self._declaration.name,
            state=PipelineState.STARTING,
            pid=os.getpid(),
            file=str(self._options.file),
            master=self._options.master,
            started_at=now,
            updated_at=now,
        )

    def _report(self, state: PipelineState) -> None:
        status = self._status
        status.state = state
        status.updated_at = time.time()
        # In the order of the file, whichever query they share.
        sinks = {sink.name: sink for watch in self._watches for sink in watch.sinks}
        status.queries = [sinks[sink.name] for sink in self._declaration.sinks if sink.name in sinks]
        status.dead_letters = sum(watch.written.get(DEAD_LETTERS, 0) for watch in self._watches)
        if any(DEAD_LETTERS in watch.written for watch in self._watches):
            status.dead_letter_sink = str(dead_letter_sink(self._declaration))
        write_status(self._directory, status)
        self._on_status(status)


def describe_failures(failures: Mapping[str, str]) -> str:
    """Why sinks failed, and what to do about it. Those that share a source often fail for the same reason."""
    names = ", ".join(f"'{name}'" for name in failures)
    causes = "; ".join(dict.fromkeys(failures.values()))
    hint = "".join(f". {remedy}" for sign, remedy in _REMEDIES.items() if sign in causes)
    return f"{'sinks' if len(failures) > 1 else 'sink'} {names} failed: {causes}{hint}"
