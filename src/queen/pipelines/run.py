"""Runs a pipeline: starts its queries, watches them, and says how they get on."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException

from queen.errors import QueenError
from queen.pipelines.declaration import Declaration, Sink, SinkKind, SourceKind
from queen.pipelines.errors import DeclarationError, PipelineError, Problem
from queen.pipelines.frames import Frames, said
from queen.pipelines.progress import QueryWatch, QueueEnds
from queen.pipelines.session import Connection
from queen.pipelines.sinks import Sinks
from queen.pipelines.state import StateDirectory
from queen.wire.pipelines import PipelineState, PipelineStatus, write_status

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.25
_BEGIN_SECONDS: Final = 0.05
_HOUSE_SECONDS: Final = 300.0
DEAD_LETTERS: Final = "dead_letters"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a command says of a run, over what the file says."""

    file: Path
    master: str
    trigger: str | None = None
    fresh: bool = False
    checkpoints: Path | None = None
    """Where they are, if not in the state directory."""
    now_and_then: Callable[[], object] | None = None
    """Housekeeping, done every few minutes and when everything is done."""


class Run:
    """One run of a pipeline. `on_status` hears every change, `stop` may be set by anyone."""

    def __init__(
        self,
        declaration: Declaration,
        connection: Connection,
        state: StateDirectory,
        options: RunOptions,
        on_status: Callable[[PipelineStatus], None] = lambda status: None,
    ) -> None:
        self._declaration = declaration
        self._connection = connection
        self._state = state
        self._options = options
        self._on_status = on_status
        self.stop = threading.Event()
        self._watches: list[QueryWatch] = []

    def run(self, open_session: Callable[[], SparkSession]) -> PipelineStatus:
        """Until it is done, stopped or failed; a failure is raised after everything else was stopped."""
        name = self._declaration.name
        with self._state.running(name) as directory:
            self._directory = directory
            self._status = self._first_status()
            self._tell(PipelineState.STARTING)
            try:
                if self._options.fresh:
                    self._state.forget(name)
                self._start(open_session())
                self._watch()
            except BaseException as error:
                self._end(PipelineState.FAILED, str(error))
                raise
            self._end(PipelineState.STOPPED if self.stop.is_set() else PipelineState.DONE, None)
            return self._status

    def _start(self, spark: SparkSession) -> None:
        planned = plan(spark, self._declaration, self._connection)
        trigger = self._options.trigger or self._declaration.trigger
        checkpoints = self._options.checkpoints or self._state.checkpoints(self._declaration.name)
        sinks = Sinks(self._declaration.name, self._connection, checkpoints, trigger)
        for sink, rows in planned:
            if self.stop.is_set():
                return
            try:
                watch = QueryWatch(sink, partial(sinks.start, sink, rows))
            except PySparkException as error:
                raise DeclarationError([Problem(sink.where, f"sink '{sink.name}': {said(error)}")]) from error
            self._watches.append(watch)
            # One after the other: each starts a process, which must answer Spark within ten seconds.
            while watch.beginning and not self.stop.wait(_BEGIN_SECONDS):
                pass

    def _watch(self) -> None:
        house = time.monotonic() + _HOUSE_SECONDS
        queue_ends = QueueEnds(self._declaration, self._connection)
        while not self.stop.is_set():
            ends = queue_ends.look()
            running = [watch for watch in self._watches if watch.active]
            for watch in self._watches:
                watch.look(ends)
                watch.keep_up()
            self._tell(PipelineState.RUNNING)
            if any(watch.failure is not None for watch in self._watches):
                break
            if not running and not any(watch.active for watch in self._watches):
                self._keep_house()
                return
            if time.monotonic() > house:
                self._keep_house()
                house = time.monotonic() + _HOUSE_SECONDS
            self.stop.wait(_LOOK_SECONDS)
        for watch in self._watches:
            watch.stop()
        failed = next((watch for watch in self._watches if watch.failure is not None), None)
        if failed is not None and not self.stop.is_set():
            raise PipelineError(f"sink '{failed.sink.name}' ({failed.sink.where}) failed: {failed.failure}")

    def _keep_house(self) -> None:
        if self._options.now_and_then is None:
            return
        try:
            self._options.now_and_then()
        except QueenError as error:
            # It can wait until the next time.
            log.warning("%s", error)

    def _end(self, state: PipelineState, error: str | None) -> None:
        for watch in self._watches:
            watch.stop()
            watch.look(None)
        self._status.error = error
        self._tell(state)

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

    def _tell(self, state: PipelineState) -> None:
        status = self._status
        status.state = state
        status.updated_at = time.time()
        status.queries = [watch.status for watch in self._watches if watch.sink.name != DEAD_LETTERS]
        for watch in self._watches:
            if watch.sink.name == DEAD_LETTERS:
                status.dead_letters = watch.status.written
                status.dead_letter_sink = str(watch.sink)
        write_status(self._directory, status)
        self._on_status(status)


def plan(spark: SparkSession, declaration: Declaration, connection: Connection) -> list[tuple[Sink, DataFrame]]:
    """Every sink with the rows it gets, dead letters last. Raises `DeclarationError`."""
    frames = Frames(spark, declaration, connection, moves_groups=False)
    planned = [(sink, frames.of(sink.source)) for sink in declaration.sinks]
    first = declaration.sinks[0]
    planned[0] = (first, Frames(spark, declaration, connection, moves_groups=True).of(first.source))
    dead_letters = frames.dead_letters()
    if dead_letters is not None:
        planned.append((dead_letter_sink(declaration), dead_letters))
    return planned


def dead_letter_sink(declaration: Declaration) -> Sink:
    """As declared, else a queue where queues are used, else the console."""
    if declaration.dead_letters is not None:
        return declaration.dead_letters
    queues = any(source.kind is SourceKind.QUEUE for source in declaration.sources)
    queues |= any(sink.kind in (SinkKind.QUEUE, SinkKind.TOPIC) for sink in declaration.sinks)
    kind = SinkKind.QUEUE if queues else SinkKind.CONSOLE
    target = f"{declaration.name}-dead-letters" if queues else ""
    return Sink(DEAD_LETTERS, declaration.where, "", kind, target)
