"""`queen pipeline`: data pipelines on Apache Spark."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import rich.console
import rich.table
import typer

from queen.cli.common.tree import command
from queen.cli.pipelines.example import examples
from queen.cli.pipelines.jobs import jobs
from queen.cli.pipelines.run import (
    LOCAL,
    Conf,
    DatabaseUrl,
    DataDir,
    FailOnDataLoss,
    Json,
    Master,
    Server,
    Token,
    connect,
    data_dir,
    fetch_declared,
    print_json,
    run_shown,
    session,
    status_table,
    sums,
)
from queen.pipelines.errors import spark_failures
from queen.pipelines.run import RunOptions
from queen.pipelines.session import require_spark
from queen.pipelines.state import StateDirectory
from queen.wire.pipelines import PipelineState

pipeline = typer.Typer(
    name="pipeline",
    help="Data pipelines on Apache Spark: windows, joins, archives and reports over queues.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
pipeline.registered_commands.extend((*jobs.registered_commands, *examples.registered_commands))

_STOP_SECONDS = 60.0


@command(
    pipeline,
    "run",
    example="queen pipeline run leads.py\nqueen pipeline run leads.yaml --once --server https://queen.example",
)
def run(
    file: Annotated[
        Path,
        typer.Argument(help="The pipeline: a Python or YAML file, or the name of one that `queen apply` declared."),
    ],
    once: Annotated[bool, typer.Option(help="Process what is available now, and end.")] = False,
    fresh: Annotated[bool, typer.Option(help="Drop the checkpoints, and start from the beginning.")] = False,
    fail_on_data_loss: FailOnDataLoss = None,
    master: Master = LOCAL,
    conf: Conf = None,
    server: Server = None,
    token: Token = None,
    database_url: DatabaseUrl = None,
    data_directory: DataDir = None,
) -> None:
    """Run a pipeline until it is stopped; the next run goes on where this one ended.

    Records that cannot be used go to the dead letters of the pipeline with
    the reason. Ctrl-C or [bold]queen pipeline stop[/bold] ends it; nothing is lost
    or done twice by that, nor by kill -9.
    """
    from queen.pipelines.declaration import ONCE
    from queen.pipelines.loading import load

    require_spark()
    directory = data_dir(data_directory)
    connection = connect(server, token, database_url, directory)
    if not file.suffix and not file.exists():
        file = fetch_declared(str(file), connection, StateDirectory(directory))
    declaration = load(file)
    options = RunOptions(
        file.absolute(),
        master,
        trigger=ONCE if once else None,
        fresh=fresh,
        fail_on_data_loss=fail_on_data_loss,
    )
    run_shown(declaration, connection, StateDirectory(directory), options, conf)


@command(
    pipeline, "validate", example="queen pipeline validate leads.py\nqueen pipeline validate leads.yaml --no-spark"
)
def validate(
    file: Annotated[Path, typer.Argument(help="The pipeline: a Python or YAML file.")],
    spark: Annotated[bool, typer.Option(help="Let Spark check SQL, columns and types, too; needs Java.")] = True,
    master: Master = LOCAL,
    conf: Conf = None,
    server: Server = None,
    token: Token = None,
    database_url: DatabaseUrl = None,
    data_directory: DataDir = None,
) -> None:
    """Check a pipeline without running it; all problems are listed with their lines."""
    from queen.pipelines.checks import warnings
    from queen.pipelines.loading import load

    declaration = load(file)
    for warning in warnings(declaration):
        print(f"{warning.where}: note: {warning.text}")
    if spark:
        require_spark()
        from queen.pipelines.queries.planning import plan

        connection = connect(server, token, database_url, data_dir(data_directory))
        with spark_failures():
            plan(session(declaration.name, master, conf), declaration, connection)
    counts = f"{len(declaration.sources)} sources, {len(declaration.steps)} steps, {len(declaration.sinks)} sinks"
    print(f"{file}: pipeline '{declaration.name}' is good: {counts}")


@command(pipeline, "list", example="queen pipeline list\nqueen pipeline list --json")
def list_pipelines(json: Json = False, data_directory: DataDir = None) -> None:
    """Show the pipelines that run or ran on this machine."""
    found = StateDirectory(data_dir(data_directory)).statuses()
    if json:
        print_json(found)
        return
    table = rich.table.Table(box=None)
    for heading in ("PIPELINE", "STATE", "SINCE", "ROWS", "LAG", "DEAD"):
        number = heading in ("ROWS", "LAG", "DEAD")
        # Numbers are never cut: in a narrow terminal, names and files are folded.
        table.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    table.add_column("FILE", overflow="fold")
    for status in found:
        lags = [query.lag for query in status.queries if query.lag is not None]
        table.add_row(
            status.name,
            status.state.value,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.started_at)),
            str(status.rows),
            str(max(lags)) if lags else "-",
            str(status.dead_letters),
            status.file,
        )
    rich.console.Console(markup=False).print(table)


@command(pipeline, "status", example="queen pipeline status leads")
def status(
    name: Annotated[str, typer.Argument(help="The pipeline.")],
    json: Json = False,
    data_directory: DataDir = None,
) -> None:
    """Show the progress of a pipeline: rows, rates, lag, late rows, dead letters. Exits with 1 when it failed."""
    found = StateDirectory(data_dir(data_directory)).status(name)
    if json:
        print_json(found)
    else:
        console = rich.console.Console(markup=False)
        console.print(status_table(found, console.width))
    if found.state is PipelineState.FAILED:
        raise typer.Exit(1)


@command(pipeline, "stop", example="queen pipeline stop leads --timeout 120")
def stop(
    name: Annotated[str, typer.Argument(help="The pipeline.")],
    timeout: Annotated[float, typer.Option(help="Seconds to wait for its end.")] = _STOP_SECONDS,
    data_directory: DataDir = None,
) -> None:
    """Stop a pipeline, and wait until it has."""
    found = StateDirectory(data_dir(data_directory)).stop(name, timeout)
    print(f"pipeline '{name}' is {found.state.value}: {sums(found)}")
