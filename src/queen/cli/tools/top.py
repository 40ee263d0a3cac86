"""`queen top`: queues, groups, lag and rates, live."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from queen.cli.common.arguments import Namespace
from queen.cli.common.exits import UserError, explain
from queen.cli.common.output import Column
from queen.cli.common.printable import on_one_line
from queen.cli.common.session import Session
from queen.cli.common.times import age, parse_duration
from queen.cli.common.tree import command, group

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

app = group("Watch queues, groups, lag and rates live.")

_FRAME_LINES = 6
"""Lines of the screen that are neither the head nor a queue or a group."""
_ALL_COLUMNS, _LEAST_NEEDED = 70, ("PROCESSING", "TOTAL")
"""The width of a terminal in which all columns leave room for names, and those that a narrower one does without."""
_SORTS = ("pending", "rate", "lag", "name")
_QUEUES = (
    Column("QUEUE", "name"),
    Column("PENDING", "pending", right=True),
    Column("PROCESSING", "processing", right=True),
    Column("TOTAL", "total", right=True),
    Column("IN/S", lambda row: _rate(row["in"]), right=True),
    Column("OUT/S", lambda row: _rate(row["out"]), right=True),
    Column("LAG", lambda row: age(row["lag"]), right=True),
)
_GROUPS = (
    Column("GROUP", "name"),
    Column("QUEUE", "queueName"),
    Column("MESSAGES", "totalLag", right=True),
    Column("LAG", lambda row: age(row["maxTimeLag"]), right=True),
    Column("STATE", "state"),
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What there was at one moment."""

    at: float
    queues: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    overview: dict[str, Any]


@command(app, "top", example="queen top\nqueen top --interval 1s --sort lag\nqueen top --once -o json")
def top(
    ctx: typer.Context,
    interval: Annotated[str, typer.Option("--interval", help="Refresh interval.")] = "2s",
    sort: Annotated[str, typer.Option("--sort", help=", ".join(_SORTS))] = "pending",
    namespace: Namespace = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="Queues and groups to show.")] = 20,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
) -> None:
    """Watch queues, groups, lag and rates live; q or Ctrl-C ends it.

    Where no terminal is, it prints one view and ends.
    """
    if sort not in _SORTS:
        raise UserError(f"--sort must be one of {', '.join(_SORTS)}, not {sort!r}")
    session = Session.of(ctx)
    seconds = max(0.1, parse_duration(interval))
    if once or not session.out.terminal:
        first = take_snapshot(session, namespace)
        time.sleep(min(1.0, seconds))
        rows = queue_rows(first, take_snapshot(session, namespace), sort)[:limit]
        session.out.rows(rows, _QUEUES)
        return
    _live(session, seconds, sort, namespace, limit)


def take_snapshot(session: Session, namespace: str | None) -> Snapshot:
    """Look at everything, with three requests."""
    queues = session.admin.list_queues()["queues"]
    groups = session.admin.list_consumer_groups() or []
    chosen = [queue for queue in queues if namespace in (None, queue["namespace"])]
    names = {queue["name"] for queue in chosen}
    return Snapshot(
        time.monotonic(),
        chosen,
        [group for group in groups if group["queueName"] in names],
        session.admin.get_overview(),
    )


def queue_rows(before: Snapshot | None, now: Snapshot, sort: str) -> list[dict[str, Any]]:
    """Queues with their rates since the snapshot before, in order."""
    earlier = {queue["name"]: queue["messages"] for queue in before.queues} if before is not None else {}
    seconds = now.at - before.at if before is not None else 0.0
    lags: dict[str, float] = {}
    for one in now.groups:
        lags[one["queueName"]] = max(lags.get(one["queueName"], 0), one["maxTimeLag"] or 0)
    rows = [_row(queue, earlier.get(queue["name"]), seconds, lags.get(queue["name"])) for queue in now.queues]
    if sort == "name":
        return sorted(rows, key=lambda row: row["name"])
    key = {"pending": "pending", "rate": "in", "lag": "lag"}[sort]
    return sorted(rows, key=lambda row: (-(row[key] or 0), row["name"]))


def _row(
    queue: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float, lag: float | None
) -> dict[str, Any]:
    messages = queue["messages"]
    pushed = popped = None
    if before is not None and seconds > 0:
        # Retention deletes messages as well: a total that falls says nothing about pushes.
        pushed = max(0, messages["total"] - before["total"]) / seconds
        waiting = messages["pending"] + messages["processing"] - before["pending"] - before["processing"]
        popped = max(0.0, pushed - waiting / seconds)
    return {"name": queue["name"], **messages, "in": pushed, "out": popped, "lag": lag}


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _live(session: Session, seconds: float, sort: str, namespace: str | None, limit: int) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from queen.client.errors import AuthError
    from queen.errors import QueenError

    console = Console(no_color=not session.out.color)
    before: Snapshot | None = None
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                now = take_snapshot(session, namespace)
                live.update(_view(session, before, now, sort, limit, console), refresh=True)
                before = now
            except AuthError:
                # It will not go by itself.
                raise
            except QueenError as error:
                live.update(Text(f"{explain(error)[1].partition('; ')[0]}; trying again"), refresh=True)
            pressed = key(seconds)
            if pressed in ("q", "\x03", "\x1b"):
                return
            sort = {"p": "pending", "r": "rate", "l": "lag", "n": "name"}.get(pressed, sort)


def _view(
    session: Session,
    before: Snapshot | None,
    now: Snapshot,
    sort: str,
    limit: int,
    console: Console,
) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    messages, throughput = now.overview["messages"], now.overview["throughput"]
    head = Text(session.server.url, style="bold")
    head.append(
        f"  {time.strftime('%H:%M:%S')}  queues {now.overview['queues']}"
        f"  partitions {now.overview['partitions']}  pending {messages['pending']}"
        f"  dead letters {messages['deadLetter']}"
        f"  in {throughput['ingestedPerSecond']:.1f}/s  out {throughput['processedPerSecond']:.1f}/s",
        style="not bold",
    )
    queues = queue_rows(before, now, sort)[:limit]
    groups = sorted(now.groups, key=lambda group: -(group["maxTimeLag"] or 0))[:limit]
    # What is below the edge of the screen would not be seen: groups have up to half of it, queues the rest.
    room = console.height - _FRAME_LINES - len(head.wrap(console, console.width))
    groups = groups[: max(1, room // 2, room - len(queues))]
    queues = queues[: max(1, room - len(groups))]
    foot = Text(f"sorted by {sort}; p pending, r rate, l lag, n name, q quit", style="dim")
    columns = [column for column in _QUEUES if console.width >= _ALL_COLUMNS or column.heading not in _LEAST_NEEDED]
    return Group(head, "", _table(columns, queues), "", _table(_GROUPS, groups), "", foot)


def _table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # In a narrow terminal names are cut, and numbers are not.
        table.add_column(column.heading, justify="right" if column.right else "left", no_wrap=column.right)
    for row in rows:
        # As text: what looks like markup is part of a name.
        cells = (on_one_line(column.text(row)) for column in columns)
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells))
    return table


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits for a key for some seconds, and gives it, or nothing."""
    if not sys.stdin.isatty():

        def sleep(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield sleep
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if ready else ""

    try:
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
