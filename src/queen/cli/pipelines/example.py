"""`queen pipeline example`: the lead-enrichment pipeline from end to end, in one command."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated
from urllib.error import URLError
from urllib.request import urlopen

import typer

from queen.chunks import chunks
from queen.cli.common.tree import command
from queen.cli.pipelines.run import LOCAL, Conf, DatabaseUrl, Master, Server, Token, connect, run_shown
from queen.errors import QueenError
from queen.pipelines.run import RunOptions
from queen.pipelines.session import Connection, require_spark
from queen.pipelines.state import StateDirectory

examples = typer.Typer()

_START_SECONDS = 120.0
_PUSHED_AT_ONCE = 500


@command(examples, "example", example="queen pipeline example\nqueen pipeline example /tmp/leads --events 20000")
def example(
    directory: Annotated[Path, typer.Argument(help="Directory for all files of the example.")] = Path("lead-example"),
    events: Annotated[int, typer.Option(min=100, help="Number of events to generate.")] = 5000,
    server: Server = None,
    token: Token = None,
    database_url: DatabaseUrl = None,
    master: Master = LOCAL,
    conf: Conf = None,
) -> None:
    """Run a whole pipeline to look at: events, enrichment, windows, a queue, Parquet, and a plot at the end.

    Without --server it starts one of its own, and stops it afterwards.
    """
    require_spark()
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    file = place_pipeline(directory)
    with contextlib.ExitStack() as stack:
        if server is None:
            server = stack.enter_context(_own_server(directory / "data"))
        connection = connect(server, token, database_url, directory / "data")
        _push(connection, events)
        _run(connection, file, directory, master, conf)
        _show_results(connection, directory)


def place_pipeline(directory: Path) -> Path:
    """The file of the pipeline; one that is there may have been edited, and is run as it is."""
    file = directory / "leads.py"
    if not file.exists():
        text = files("queen.pipelines.example").joinpath("leads.py").read_text("utf-8")
        file.write_text(text.replace('parquet="lead-scores"', f"parquet={str(directory / 'lead-scores')!r}"))
    return file


@contextlib.contextmanager
def _own_server(data: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from queen.cli import main; main()", "serve", "--host", "127.0.0.1"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PG_", "DATABASE_URLS"))}
    url = f"http://127.0.0.1:{port}"
    print(f"1. starting a server of its own at {url}, data in {data}", flush=True)
    with (data.parent / "server.log").open("w") as log:
        child = subprocess.Popen(
            [*command, "--port", str(port), "--workers", "1", "--data-dir", str(data)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_for(url, child, data.parent / "server.log")
            yield url
        finally:
            child.terminate()
            child.wait()


def _wait_for(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            if child.poll() is not None or time.monotonic() > deadline:
                raise QueenError(f"the server has not started; {log} says why") from None
        time.sleep(0.1)


def _push(connection: Connection, count: int) -> None:
    from queen.client.sync import QueenSync
    from queen.pipelines.example.events import lead_events

    made = list(lead_events(count))
    print(f"2. pushing {len(made)} events to queue 'lead-events'", flush=True)
    with QueenSync(connection.server, bearer_token=connection.token) as queen:
        # The same ids every time, so that the events are stored once if the example is run twice.
        items = [{"transactionId": f"event-{number}", "data": event} for number, event in enumerate(made)]
        for some in chunks(items, _PUSHED_AT_ONCE):
            queen.queue("lead-events").push(some)
        for name in ("hot-leads", "lead-errors"):
            queen.queue(name).create()


def _run(connection: Connection, file: Path, directory: Path, master: str, conf: list[str] | None) -> None:
    from queen.pipelines.declaration import ONCE
    from queen.pipelines.loading import load

    print(f"3. running {file}", flush=True)
    options = RunOptions(file, master, trigger=ONCE)
    run_shown(load(file), connection, StateDirectory(directory / "data"), options, conf)


def _show_results(connection: Connection, directory: Path) -> None:
    from queen.client.sync import QueenSync
    from queen.pipelines.example.plot import plot_scores

    picture = directory / "lead-scores.png"
    windows = plot_scores(directory / "lead-scores", picture, "How interested companies are")
    with QueenSync(connection.server, bearer_token=connection.token) as queen:
        held = {
            name: queen.request("GET", f"/api/v1/status/queues/{name}")["totals"]["total"]
            for name in ("hot-leads", "lead-errors")
        }
    print(
        f"4. done:\n"
        f"   {held['hot-leads']} hot leads are in queue 'hot-leads'\n"
        f"   {held['lead-errors']} events that could not be used are in queue 'lead-errors', with the reason\n"
        f"   {windows} windows are in {directory / 'lead-scores'} (Parquet)\n"
        f"   {picture} shows them\n"
        f"   the pipeline is {directory / 'leads.py'}: change it, and run this again"
    )
