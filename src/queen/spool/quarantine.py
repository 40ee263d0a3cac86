"""The quarantine of a spool: records that PostgreSQL refused, with the reason. They are retried, never dropped."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from queen.files import sync
from queen.spool.files import (
    FAILED,
    FINISHED,
    file_records,
    make_directory,
    single_record_file,
    write_durably,
)
from queen.spool.record import Record

log = logging.getLogger(__name__)

_NOTE = ".json"


@dataclass(frozen=True, slots=True)
class Failed:
    """A quarantined record, in a file of its own."""

    path: Path
    inode: int
    record: Record

    @property
    def file_id(self) -> uuid.UUID:
        """Names its position; the same record has the same name whenever it is quarantined."""
        return uuid.UUID(bytes=self.record.block)


class FailedRecords:
    """The directory `failed/`: `<first message id>.buf`, and beside it a `.json` for people to read."""

    def __init__(self, root: Path) -> None:
        self._directory = root / FAILED

    def add(self, record: Record, reason: str) -> None:
        """Quarantine a record, durably."""
        make_directory(self._directory)
        name = str(uuid.UUID(bytes=record.block))
        note = {"queue": record.queue, "partition": record.partition, "messages": record.count, "reason": reason}
        write_durably(self._directory / f"{name}{_NOTE}", msgspec.json.format(msgspec.json.encode(note)) + b"\n")
        kept = msgspec.structs.replace(record, reason=reason)
        write_durably(self._directory / f"{name}{FINISHED}", single_record_file(kept))
        log.error(
            "%d messages for queue %r, partition %r, quarantined in %s: %s",
            record.count,
            record.queue,
            record.partition,
            self._directory / f"{name}{FINISHED}",
            reason,
        )

    def remove(self, failed: Failed) -> None:
        """Remove a record that was stored, unless part of it was quarantined again under the same name."""
        if failed.path.exists() and failed.path.stat().st_ino != failed.inode:
            return
        failed.path.unlink(missing_ok=True)
        failed.path.with_suffix(_NOTE).unlink(missing_ok=True)
        sync(self._directory)

    def read(self) -> Iterator[Failed]:
        """Every quarantined record, oldest first."""
        for path in self._files():
            for record, _ in file_records(path):
                yield Failed(path, path.stat().st_ino, record)

    def count(self) -> tuple[int, int]:
        """How many there are, and how many bytes they take."""
        files = self._files()
        return len(files), sum(path.stat().st_size for path in files)

    def _files(self) -> list[Path]:
        if not self._directory.is_dir():
            return []
        return sorted(path for path in self._directory.iterdir() if path.name.endswith(FINISHED))
