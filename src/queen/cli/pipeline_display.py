"""How a running pipeline looks in a terminal, and in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import rich.console
import rich.live
from rich.progress_bar import ProgressBar
from rich.table import Table

from queen.wire.pipelines import PipelineState, PipelineStatus, QueryStatus

_LOG_SECONDS: Final = 10.0
_BAR_WIDTH: Final = 24


@contextmanager
def display(name: str) -> Iterator[Callable[[PipelineStatus], None]]:
    """Bars in a terminal; else a line now and then."""
    console = rich.console.Console(stderr=True)
    if not console.is_terminal:
        yield _Log(name)
        return
    with rich.live.Live(f"pipeline '{name}' is starting Spark", console=console, refresh_per_second=4) as live:
        yield lambda status: live.update(status_table(status))


def status_table(status: PipelineStatus) -> Table:
    """All that is known of a run."""
    ago = f"{max(0.0, time.time() - status.updated_at):.0f} s ago"
    title = f"{status.name}: {status.state.value} (process {status.pid}, {status.master}, {ago})"
    caption = f"{status.dead_letters} dead letters" + (
        f" in {status.dead_letter_sink}" if status.dead_letter_sink else ""
    )
    if status.error:
        caption += f"\n{status.error}"
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=None)
    for heading in ("SINK", "", "ROWS", "ROWS/S", "LAG", "WRITTEN", "LATE", "STATE", "BATCHES", "LAST", "WATERMARK"):
        table.add_column(heading, justify="left" if heading in ("SINK", "", "WATERMARK") else "right", no_wrap=True)
    for query in status.queries:
        table.add_row(
            f"{query.name} ({query.sink})",
            _bar(query, status.state),
            str(query.rows),
            f"{query.rows_per_second:.0f}",
            "-" if query.lag is None else str(query.lag),
            str(query.written),
            str(query.late),
            str(query.state_rows),
            str(query.batches),
            f"{query.batch_seconds:.1f} s",
            query.watermark or "-",
        )
    return table


def _bar(query: QueryStatus, state: PipelineState) -> ProgressBar:
    """How much of what there is was read; a pulse where nobody knows how much there is."""
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
    read, written = sum(query.rows for query in status.queries), sum(query.written for query in status.queries)
    return f"{read} rows read, {written} written, {status.dead_letters} dead letters"
