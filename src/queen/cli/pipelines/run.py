"""Runs a pipeline in this terminal."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import rich.console
import rich.live
import typer
from rich.progress_bar import ProgressBar
from rich.table import Table

from queen.errors import QueenError
from queen.pipelines.declaration import Declaration
from queen.pipelines.errors import spark_failures
from queen.pipelines.lineage.runs import run_lineage
from queen.pipelines.run import Run, RunOptions
from queen.pipelines.session import Connection
from queen.pipelines.state import StateDirectory
from queen.settings import Settings
from queen.wire.pipelines import PipelineState, PipelineStatus, QueryStatus

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Where pipelines keep their state. [QUEEN_DATA_DIR]")]
Server = Annotated[str | None, typer.Option(help="URL of the server. [QUEEN_SERVER, http://localhost:6632]")]
Token = Annotated[str | None, typer.Option(help="Bearer token for the server. [QUEEN_TOKEN]")]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        help="PostgreSQL behind the server, one URL for each shard, separated by commas; Spark reads it directly."
        " [DATABASE_URLS, PG_HOST, ..., the embedded one]"
    ),
]
Master = Annotated[str, typer.Option(help="The Spark to run on: local[*], spark://host:7077, yarn, k8s://...")]
FailOnDataLoss = Annotated[
    bool | None,
    typer.Option(
        "--fail-on-data-loss/--no-fail-on-data-loss",
        help="Whether messages that retention or a deletion removed before they were read end the run, or are skipped."
        " [as the file says, else yes]",
        show_default=False,
    ),
]
Conf = Annotated[list[str] | None, typer.Option(help="A setting of Spark, key=value; may be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LOCAL = "local[*]"


def print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def data_dir(given: Path | None) -> Path:
    return Settings.from_env(os.environ, queen_data_dir=given).queen_data_dir


def connect(server: str | None, token: str | None, database_url: str | None, directory: Path | None) -> Connection:
    """Where the queues are, as the options say, else the environment, else the server of this machine."""
    settings = Settings.from_env(os.environ, queen_data_dir=directory, database_urls=database_url)
    return Connection(
        server=server or os.environ.get("QUEEN_SERVER") or f"http://localhost:{settings.port}",
        token=token or os.environ.get("QUEEN_TOKEN"),
        databases=settings.database_dsns or _embedded(settings.queen_data_dir),
    )


def fetch_declared(name: str, connection: Connection, states: StateDirectory) -> Path:
    """The declaration that the server has under a name, as a file."""
    import yaml

    from queen.client.sync import QueenSync

    with QueenSync(connection.server, bearer_token=connection.token) as queen:
        declared = {one["name"]: one["declaration"] for one in queen.admin.list_pipeline_declarations()["declarations"]}
    if name not in declared:
        known = ", ".join(declared) or "none"
        raise QueenError(f"there is no file {name}, and no pipeline of that name was declared; there are: {known}")
    path = states.of(name) / "declared.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"pipeline": name, **declared[name]}, sort_keys=False, allow_unicode=True), "utf-8")
    return path


def session(name: str, master: str, conf: list[str] | None) -> SparkSession:
    """Raises `SparkMissing`."""
    from queen.pipelines.session import open_session

    settings = {}
    for item in conf or ():
        key, equals, value = item.partition("=")
        if not equals or not key.startswith("spark."):
            raise QueenError(f"--conf {item}: expected a setting of Spark such as spark.driver.memory=2g")
        settings[key] = value
    return open_session(name, master, settings)


def _embedded(directory: Path) -> tuple[str, ...]:
    """The embedded PostgreSQL of a server that runs here."""
    from queen.embedded.postmaster import find_postmaster

    postmaster = find_postmaster(directory / "postgres" / "cluster")
    return (postmaster.dsn("postgres"),) if postmaster is not None else ()


_LOG_SECONDS: Final = 10.0
_BAR_WIDTH: Final = 24
_WIDE: Final = 120


@contextmanager
def display(name: str) -> Iterator[Callable[[PipelineStatus], None]]:
    """Bars in a terminal; else a line now and then."""
    console = rich.console.Console(stderr=True, markup=False)
    if not console.is_terminal:
        yield _Log(name)
        return
    with rich.live.Live(f"pipeline '{name}' is starting Spark", console=console, refresh_per_second=4) as live:
        yield lambda status: live.update(status_table(status, console.width))


def status_table(status: PipelineStatus, width: int) -> Table:
    """All that is known of a run, in a terminal of so many columns."""
    ago = f"{max(0.0, time.time() - status.updated_at):.0f} s ago"
    title = f"{status.name}: {status.state.value} (process {status.pid}, {status.master}, {ago})"
    caption = f"{status.dead_letters} dead letters" + (
        f" in {status.dead_letter_sink}" if status.dead_letter_sink else ""
    )
    if status.error:
        caption += f"\n{status.error}"
    watermarks = {query.name: query.watermark for query in status.queries if query.watermark}
    if watermarks:
        caption += "\nwatermark: " + ", ".join(f"{name} {time}" for name, time in watermarks.items())
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=None)
    # Numbers are never cut: in a narrow terminal the names are folded, and the bar is the first to go.
    table.add_column("SINK", overflow="fold", min_width=8)
    wide = width >= _WIDE
    if wide:
        table.add_column("")
    for heading in ("ROWS", "ROWS/S", "LAG", "WRITTEN", "LATE", "STATE", "BATCHES", "LAST"):
        table.add_column(heading, justify="right", no_wrap=True)
    for query in status.queries:
        table.add_row(
            f"{query.name} ({query.sink})" if wide else query.name,
            *([_bar(query, status.state)] if wide else []),
            str(query.rows),
            f"{query.rows_per_second:.0f}",
            "-" if query.lag is None else str(query.lag),
            str(query.written),
            str(query.late),
            str(query.state_rows),
            str(query.batches),
            f"{query.batch_seconds:.1f} s",
        )
    return table


def _bar(query: QueryStatus, state: PipelineState) -> ProgressBar:
    """How much of the input was read; a pulse where its size is not known."""
    running = state in (PipelineState.STARTING, PipelineState.RUNNING)
    if query.lag is None and running:
        return ProgressBar(total=None, width=_BAR_WIDTH, pulse=True)
    total = max(1, query.rows + (query.lag or 0))
    return ProgressBar(total=total, completed=query.rows if query.lag else total, width=_BAR_WIDTH)


class _Log:
    """A line when something changes, at most every ten seconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._next = 0.0
        self._last: PipelineState | None = None

    def __call__(self, status: PipelineStatus) -> None:
        now = time.monotonic()
        if status.state is self._last and now < self._next:
            return
        self._last, self._next = status.state, now + _LOG_SECONDS
        print(f"{self._name}: {status.state.value}; {_line(status)}", file=sys.stderr, flush=True)


def _line(status: PipelineStatus) -> str:
    parts = [
        f"{query.name} {query.rows} rows ({query.rows_per_second:.0f}/s"
        + (f", lag {query.lag}" if query.lag is not None else "")
        + f"), {query.written} written"
        for query in status.queries
    ]
    return "; ".join((*parts, f"{status.dead_letters} dead letters"))


def sums(status: PipelineStatus) -> str:
    """What a run did, in a line."""
    written = sum(query.written for query in status.queries)
    return f"{status.rows} rows read, {written} written, {status.dead_letters} dead letters"


def run_shown(
    declaration: Declaration,
    connection: Connection,
    state: StateDirectory,
    options: RunOptions,
    conf: list[str] | None,
) -> None:
    """Until it is done or stopped, with its progress to be seen."""
    with display(declaration.name) as show, run_lineage(declaration, connection, options.trigger) as lineage:

        def report(status: PipelineStatus) -> None:
            show(status)
            lineage.report(status)

        run = Run(declaration, connection, state, options, report, lineage.planned)
        with _stopped_by_signals(run) as listen, spark_failures():

            def open_session() -> SparkSession:
                opened = session(declaration.name, options.master, conf)
                # PySpark takes Ctrl-C for itself when its context is made.
                listen()
                return opened

            status = run.run(open_session)
    print(f"pipeline '{status.name}' is {status.state.value}: {sums(status)}")


@contextmanager
def _stopped_by_signals(run: Run) -> Iterator[Callable[[], None]]:
    """The first signal ends the run, a second one the process. Gives what listens again after others have."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def ask(number: int, frame: FrameType | None) -> None:
        run.stop.set()
        signal.signal(number, signal.SIG_DFL)

    def listen() -> None:
        if not run.stop.is_set():
            for number in before:
                signal.signal(number, ask)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    listen()
    try:
        yield listen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
