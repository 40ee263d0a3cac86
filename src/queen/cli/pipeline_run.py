"""Runs a pipeline in this terminal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from queen.cli.pipeline_display import display, sums
from queen.cli.pipeline_options import session
from queen.pipelines.connection import Connection
from queen.pipelines.declaration import Declaration
from queen.pipelines.run import Run, RunOptions
from queen.pipelines.state import StateDirectory


def run_shown(
    declaration: Declaration,
    connection: Connection,
    state: StateDirectory,
    options: RunOptions,
    conf: list[str] | None,
) -> None:
    """Until it is done or stopped, with its progress to be seen."""
    with display(declaration.name) as show:
        run = Run(declaration, connection, state, options, show)
        with _stopped_by_signals(run):
            status = run.run(lambda: session(declaration.name, options.master, conf))
    print(f"pipeline '{status.name}' is {status.state.value}: {sums(status)}")


@contextmanager
def _stopped_by_signals(run: Run) -> Iterator[None]:
    """The first signal ends the run, a second one the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        run.stop.set()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
