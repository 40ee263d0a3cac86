"""The reports of a host's workers, each in a file of the directory that they share."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from queen.metrics.report import Report, decode_report, encode_report

log = logging.getLogger(__name__)


class Board:
    """Where a worker pins up its report, and reads those of the others."""

    def __init__(self, directory: Path, worker_id: int, workers: int) -> None:
        self._directory = directory
        self._worker_id = worker_id
        self._workers = workers
        self._free = asyncio.Lock()

    async def pin(self, report: Report) -> None:
        """Replace this worker's report; a reader sees the old one or the new one, whole."""
        path, content = self._path(self._worker_id), encode_report(report)
        async with self._free:
            # In a thread: a disk that is busy shall not keep requests waiting.
            await asyncio.to_thread(_replace, path, content)

    def own(self) -> Report | None:
        """The report that this worker, or the one that ran in its place before, pinned up last."""
        return self._read(self._worker_id)

    async def others(self) -> list[Report]:
        """The reports of the other workers, as of when each last pinned one up."""
        if self._workers == 1:
            return []
        return await asyncio.to_thread(self._read_others)

    def _read_others(self) -> list[Report]:
        reports = [self._read(peer) for peer in range(self._workers) if peer != self._worker_id]
        return [report for report in reports if report is not None]

    def _read(self, worker_id: int) -> Report | None:
        try:
            return decode_report(self._path(worker_id).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            # By a worker of another version, say; it pins up a readable one when it is started again.
            log.warning("the report of worker %d cannot be read: %s", worker_id, error)
            return None

    def _path(self, worker_id: int) -> Path:
        return self._directory / f"worker-{worker_id}.report"


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    draft.replace(path)
