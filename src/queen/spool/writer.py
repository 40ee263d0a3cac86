"""The writer of the spool: append, then fsync."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from queen.errors import Overloaded
from queen.files import sync
from queen.spool.files import (
    FINISHED,
    FRAME_BYTES,
    HEADER_BYTES,
    UNFINISHED,
    claim_directory,
    file_header,
    frame,
    write_all,
)
from queen.spool.record import Record, encode_record
from queen.spool.shared_state import SharedSpoolState
from queen.wire.ids import IdSource

log = logging.getLogger(__name__)

_LARGEST_FILE_BYTES = 64 << 20
# After a failed write it is tried so often, with so much, whether the disk can be written to again.
_TRY_SECONDS = 5.0
_TRIED_BYTES = 64 << 10


class SpoolRefused(Overloaded):
    """The spool is full, or its disk cannot be written to. Nothing was kept."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of a record: its file, first byte and the byte behind it; and its encoding."""

    file_id: uuid.UUID
    start: int
    end: int
    body: bytes


class SpoolWriter:
    """Appends the records of one process to files in a directory of its own, made when first needed."""

    def __init__(
        self,
        root: Path,
        state: SharedSpoolState,
        *,
        records_per_file: int,
        most_bytes: int,
        idle_seconds: float,
        most_messages: int | None = None,
        unusable: str = "",
    ) -> None:
        """`unusable` says why nothing can be written at all."""
        self._unusable = unusable
        self._root = root
        self._state = state
        self._records_per_file = records_per_file
        self._most_bytes = most_bytes
        self._most_messages = most_messages
        self._idle_seconds = idle_seconds
        self._ids = IdSource()
        self._free = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._finishing: asyncio.Task[None] | None = None
        self._trying: asyncio.Task[None] | None = None
        self._directory: Path | None = None
        self._lock: int | None = None
        self._file: _OpenFile | None = None
        self.healthy = not unusable

    async def append(self, records: Sequence[Record], *, due_at: float, flush_at: int) -> list[Placed]:
        """Make records durable, with one fsync for all of them. Raises `SpoolRefused`: then none was kept.

        They are stored from `due_at` on (seconds since 1970), or when so many messages are waiting.
        """
        if self._unusable:
            raise SpoolRefused(f"{self._unusable}; nothing was stored, retry later")
        async with self._free:
            if self._idle is not None:
                self._idle.cancel()
            try:
                placed = await asyncio.to_thread(self._append, records, due_at, flush_at)
            finally:
                if not self.healthy and self._trying is None:
                    self._trying = asyncio.get_running_loop().create_task(self._until_healthy())
            self._idle = asyncio.get_running_loop().call_later(self._idle_seconds, self._begin_finish)
            return placed

    async def close(self) -> None:
        """Finish the file, and leave it to the drainer."""
        if self._idle is not None:
            self._idle.cancel()
        if self._trying is not None:
            self._trying.cancel()
        await self._finish()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _begin_finish(self) -> None:
        if self._state.outage:
            # Nothing can be stored now: avoid many small files.
            self._idle = asyncio.get_running_loop().call_later(self._idle_seconds, self._begin_finish)
            return
        self._finishing = asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        async with self._free:
            await asyncio.to_thread(self._finish_file)

    async def _until_healthy(self) -> None:
        """Without it, a disk that was full once would count as full until the next outage of PostgreSQL."""
        while not self.healthy:
            await asyncio.sleep(_TRY_SECONDS)
            async with self._free:
                if not self.healthy:
                    await asyncio.to_thread(self._try)
        self._trying = None

    def _try(self) -> None:
        try:
            with tempfile.TemporaryFile(dir=self._directory or self._root) as file:
                file.write(bytes(_TRIED_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            return
        self._note_success()

    def _note_success(self) -> None:
        if not self.healthy:
            log.info("spool %s can be written to again", self._root)
        self.healthy = True

    def _append(self, records: Sequence[Record], due_at: float, flush_at: int) -> list[Placed]:
        # The order of a record is not known yet; its encoding has the same length whatever it is.
        nbytes = sum(FRAME_BYTES + len(encode_record(record)) for record in records)
        try:
            with self._state.locked():
                self._check_room(sum(record.count for record in records), nbytes)
                # Made under the lock: no file then means that no process is about to write.
                file = self._file or self._open()
                first = self._state.accept(records, nbytes, due_at, flush_at)
        except OSError as error:
            raise self._refusal(error) from error
        try:
            placed = file.append(records, first)
        except OSError as error:
            self._state.withdraw(records, nbytes)
            self._give_up_file()
            raise self._refusal(error) from error
        self._note_success()
        if file.records >= self._records_per_file or file.size >= _LARGEST_FILE_BYTES:
            self._finish_file()
        return placed

    def _check_room(self, messages: int, nbytes: int) -> None:
        state = self._state
        if state.nbytes + nbytes > self._most_bytes:
            raise SpoolRefused(
                f"the spool is full: {state.nbytes >> 20} MB of {self._most_bytes >> 20} MB"
                " (FILE_BUFFER_MAX_MB); nothing was stored, retry later"
            )
        if self._most_messages is not None and state.messages + messages > self._most_messages:
            raise SpoolRefused(
                f"the buffer is full: {state.messages} of {self._most_messages} items (MAX_BUFFER_LENGTH);"
                " nothing was stored, retry"
            )

    def _open(self) -> _OpenFile:
        if self._directory is None:
            directory = self._root / self._ids.uuid()
            self._lock = claim_directory(directory)
            self._directory = directory
        self._file = _OpenFile(self._directory, uuid.UUID(self._ids.uuid()))
        return self._file

    def _finish_file(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.finish()
        except OSError as error:
            # Its records are durable under the old name, and are stored when this process ends.
            log.warning("spool file not finished: %s", error)

    def _give_up_file(self) -> None:
        """After a failed write the file is unknown beyond the last fsync: it is truncated and not written again."""
        file = self._file
        if file is not None:
            file.cut_back()
        self._finish_file()

    def _refusal(self, error: OSError) -> SpoolRefused:
        if self.healthy:
            log.error("spool %s cannot be written to: %s", self._root, error.strerror or error)
        self.healthy = False
        return SpoolRefused(
            f"the spool cannot be written to ({error.strerror or error}); nothing was stored, retry later"
        )


class _OpenFile:
    """A file that is being written. `size` is how much of it is durable."""

    def __init__(self, directory: Path, file_id: uuid.UUID) -> None:
        self._path = directory / f"{file_id}{UNFINISHED}"
        self._id = file_id
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._named = False
        self.size = 0
        self.records = 0

    def append(self, records: Sequence[Record], first: int) -> list[Placed]:
        bodies = [
            encode_record(msgspec.structs.replace(record, order=order)) for order, record in enumerate(records, first)
        ]
        frames = [frame(body, self._id) for body in bodies]
        content = b"".join(frames if self.size else (file_header(self._id), *frames))
        placed: list[Placed] = []
        start = self.size or HEADER_BYTES
        for body in bodies:
            placed.append(Placed(self._id, start, start := start + FRAME_BYTES + len(body), body))
        write_all(self._file, content)
        os.fdatasync(self._file)
        if not self._named:
            sync(self._path.parent)
            self._named = True
        self.size += len(content)
        self.records += len(records)
        return placed

    def cut_back(self) -> None:
        try:
            os.ftruncate(self._file, self.size)
        except OSError as error:
            log.warning("spool file not truncated, unanswered records may be stored: %s", error)

    def finish(self) -> None:
        os.close(self._file)
        if self.size <= HEADER_BYTES:
            self._path.unlink()
        else:
            self._path.rename(self._path.with_name(f"{self._id}{FINISHED}"))
        sync(self._path.parent)
