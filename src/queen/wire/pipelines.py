"""The status of a pipeline: a file that its process replaces, and that servers and commands read."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

STATUS_FILE = "status.json"


class PipelineState(enum.Enum):
    """Where a run is."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    DONE = "done"
    FAILED = "failed"


class QueryStatus(msgspec.Struct, rename="camel", kw_only=True):
    """The way from the sources of a pipeline to one sink. Sinks that share a query have its figures in common."""

    name: str
    sink: str = ""
    sources: list[str] = msgspec.field(default_factory=list)
    """The sources that its rows come from."""
    batches: int = 0
    rows: int = 0
    """Rows read since the run began."""
    written: int = 0
    """Rows given to the sink since the run began."""
    rows_per_second: float = 0.0
    """Current rate of rows read."""
    batch_seconds: float = 0.0
    """How long the last batch took."""
    lag: int | None = None
    """Messages of its queues that it has not read; None where that is not known."""
    late: int = 0
    """Rows that came after the watermark and were left out: they are dead letters, too."""
    state_rows: int = 0
    """Rows kept for windows, joins and dedup."""
    watermark: str | None = None


class PipelineStatus(msgspec.Struct, rename="camel", kw_only=True):
    """One run of a pipeline."""

    name: str
    state: PipelineState
    pid: int
    file: str
    master: str
    started_at: float
    updated_at: float
    dead_letters: int = 0
    """Dead letters since the run began."""
    dead_letter_sink: str = ""
    error: str | None = None
    queries: list[QueryStatus] = msgspec.field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows read from the sources; once, however many queries read the same ones."""
        by_sources: dict[frozenset[str], int] = {}
        for query in self.queries:
            key = frozenset(query.sources)
            by_sources[key] = max(by_sources.get(key, 0), query.rows)
        return sum(rows for key, rows in by_sources.items() if not any(key < other for other in by_sources))


def write_status(directory: Path, status: PipelineStatus) -> None:
    """Replace the file as a whole, so that no reader sees half of one."""
    target = directory / STATUS_FILE
    fresh = target.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_bytes(msgspec.json.encode(status))
    fresh.replace(target)


def read_status(directory: Path) -> PipelineStatus | None:
    """What the run in this directory said last; None where there is nothing that can be read."""
    try:
        return msgspec.json.decode((directory / STATUS_FILE).read_bytes(), type=PipelineStatus)
    except (OSError, msgspec.DecodeError):
        return None


def statuses(pipelines_dir: Path) -> Iterator[PipelineStatus]:
    """Every pipeline that ever ran here, by name."""
    try:
        directories = sorted(pipelines_dir.iterdir())
    except OSError:
        return
    for directory in directories:
        status = read_status(directory)
        if status is not None:
            yield status
