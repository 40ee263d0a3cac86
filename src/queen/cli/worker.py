"""`queen worker`: run the tasks of an application."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from queen.cli.common.tree import command, group
from queen.tasks.command import run_worker

app = group("Run the tasks of an application.")


@command(app, "worker", example="queen worker shop:app --processes 2")
def worker(
    application: Annotated[str, typer.Argument(metavar="MODULE:APP", help="The `App` of `queen.tasks`.")],
    queue: Annotated[list[str] | None, typer.Option(help="Only this queue; may be repeated.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Jobs at a time in each process.")] = 10,
    processes: Annotated[int, typer.Option(min=1, help="Processes; one that dies is started again.")] = 1,
    stop_timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which a stop releases jobs that still run.")
    ] = None,
) -> None:
    """Run the tasks of an application: coroutines in an event loop, functions in threads.

    SIGTERM and Ctrl-C let it finish the jobs that run; those that take longer than --stop-timeout are released, and
    run elsewhere.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    run_worker(application, queue or [], concurrency, processes, stop_timeout)
