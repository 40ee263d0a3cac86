"""The reader of the spool: the records of all its files, in the order in which they were accepted."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from queen.files import sync
from queen.spool.files import (
    DAMAGED,
    FINISHED,
    FRAME_BYTES,
    HEADER_BYTES,
    REPLAYED,
    UNFINISHED,
    directories,
    find_frame,
    is_written_to,
    make_directory,
    parse_header,
    read_frame,
    readable,
    remove_directory,
    spool_files,
    write_durably,
)
from queen.spool.record import Record
from queen.spool.shared_state import SharedSpoolState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Taken:
    """A record, and the byte of its file behind it."""

    tail: _Tail
    file_id: uuid.UUID
    record: Record
    nbytes: int
    end: int


class SpoolReader:
    """Used by the one process of a host that drains."""

    def __init__(self, root: Path, state: SharedSpoolState) -> None:
        self._root = root
        self._state = state
        self._tails: dict[Path, list[_Tail]] = {}
        """The files of each sub-directory, oldest first: their records follow each other."""
        self._progress: Mapping[uuid.UUID, int] = {}
        self._newest = 0

    def begin(self, progress: Mapping[uuid.UUID, int]) -> None:
        """Start at the stored positions of files.

        Records before them may still be counted in the shared state, until the spool is empty.
        """
        self.close()
        self._progress = progress
        self._look()

    def rewind(self, progress: Mapping[uuid.UUID, int]) -> None:
        """Records that were taken may not have been stored: go back to the stored positions."""
        for tail in self._all_tails():
            stored = tail.rewind(progress.get(uuid.UUID(tail.name), 0))
            if stored:
                self.settle(stored)

    def take(self, most_records: int, most_bytes: int) -> list[Taken]:
        """The next records in order, without what a live worker is just writing."""
        taken: list[Taken] = []
        nbytes = 0
        looked = False
        while len(taken) < most_records and nbytes < most_bytes:
            tail = self._next_tail()
            if tail is None:
                if looked:
                    break
                looked = True
                # Every record answered before this number was given is in a file by now.
                self._newest = self._state.order
                self._look()
                continue
            one = tail.next()
            nbytes += one.nbytes
            taken.append(one)
        return taken

    def settle(self, taken: Sequence[Taken]) -> None:
        """Records are stored or quarantined."""
        for one in taken:
            one.tail.settled = one.end
        self._state.settle([one.record for one in taken], sum(one.nbytes for one in taken))

    def remove_finished(self, keep_seconds: int = 0) -> list[uuid.UUID]:
        """Remove the files of which everything is settled, or move them to `replayed/`; returns their ids."""
        gone = []
        for directory, tails in self._tails.items():
            over = [tail for tail in tails if tail.over]
            for tail in over:
                tail.close()
                if keep_seconds:
                    self._keep(tail.path)
                else:
                    tail.path.unlink(missing_ok=True)
                tails.remove(tail)
                if tail.file_id is not None:
                    gone.append(tail.file_id)
            if over:
                sync(directory)
        return gone

    def remove_kept(self, keep_seconds: int) -> None:
        """Remove files from `replayed/` after `keep_seconds`."""
        directory = self._root / REPLAYED
        for path in directory.iterdir() if directory.is_dir() else ():
            if path.stat().st_mtime < time.time() - keep_seconds:
                path.unlink(missing_ok=True)

    def _keep(self, path: Path) -> None:
        directory = self._root / REPLAYED
        make_directory(directory)
        path.rename(directory / path.name)

    def clear_if_drained(self) -> bool:
        """Whether everything was taken; then the shared state is cleared."""
        with self._state.locked():
            # Under the lock, as directories and files are made under it.
            self._look(remove_empty=True)
            if any(tail.head() is not None for tail in self._all_tails()):
                return False
            self._state.clear(empty=not any(self._tails.values()))
        return True

    def file_ids(self) -> set[uuid.UUID]:
        """The ids of the known files."""
        return {uuid.UUID(tail.name) for tail in self._all_tails()}

    @property
    def has_files(self) -> bool:
        return any(self._tails.values())

    def close(self) -> None:
        for tail in self._all_tails():
            tail.close()
        self._tails.clear()

    def _all_tails(self) -> Iterator[_Tail]:
        for tails in self._tails.values():
            yield from tails

    def _next_tail(self) -> _Tail | None:
        """The file with the next record; None when an earlier one may not be visible yet."""
        chosen, lowest = None, self._newest + 1
        for tails in self._tails.values():
            # The files of a directory follow each other: only the first that has a record counts.
            for tail in tails:
                head = tail.head()
                if head is not None:
                    if head.record.order < lowest:
                        chosen, lowest = tail, head.record.order
                    break
        return chosen

    def _look(self, *, remove_empty: bool = False) -> None:
        """Find new and finished files; `remove_empty`: remove directories of dead processes."""
        for directory in directories(self._root):
            alive = is_written_to(directory)
            paths = spool_files(directory)
            known = {tail.name: tail for tail in self._tails.get(directory, ())}
            tails = self._tails[directory] = []
            for path in paths:
                name = path.name.partition(".")[0]
                tail = known.pop(name, None) or _Tail(name, self)
                tail.path, tail.finished = path, not (alive and path.name.endswith(UNFINISHED))
                tails.append(tail)
            for gone in known.values():
                gone.close()
            if remove_empty and not paths and not alive:
                remove_directory(directory)
                del self._tails[directory]

    def replayed_to(self, file_id: uuid.UUID) -> int:
        return self._progress.get(file_id, 0)

    def damaged(self, path: Path, content: bytes, start: int, what: str) -> None:
        """Keep bytes that are no record in `damaged/`."""
        directory = self._root / DAMAGED
        make_directory(directory)
        kept = directory / f"{path.name.partition('.')[0]}-{start}.bin"
        write_durably(kept, content)
        self._state.note_damage()
        log.error("%s: %d bytes at offset %d are %s; kept in %s", path, len(content), start, what, kept)


class _Tail:
    """One file: how far it was read, and how far it is settled."""

    def __init__(self, name: str, reader: SpoolReader) -> None:
        self.name = name
        self.path = Path()
        self.finished = False
        self.file_id: uuid.UUID | None = None
        self.settled = HEADER_BYTES
        self._reader = reader
        self._file: int | None = None
        self._at = HEADER_BYTES
        self._head: Taken | None = None

    @property
    def over(self) -> bool:
        """Whether the file is finished and nothing of it is left."""
        return self.finished and self.head() is None and self._at >= self._size()

    def head(self) -> Taken | None:
        """The next record, if there is one."""
        if self._head is None:
            file_id = self._open()
            self._head = None if file_id is None else self._record(file_id)
        return self._head

    def next(self) -> Taken:
        head = self.head()
        assert head is not None
        self._head = None
        self._at = head.end
        return head

    def rewind(self, position: int) -> list[Taken]:
        """Go back to where everything was settled; returns the records from there to `position`, which are stored."""
        self._head, self._at = None, self.settled
        stored: list[Taken] = []
        while self._at < position and self.head() is not None:
            stored.append(self.next())
        return stored

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> uuid.UUID | None:
        """The id of the file; None when it has none (yet). Opened lazily: there may be very many files."""
        if self.file_id is not None:
            return self.file_id
        if self._file is None:
            self._file = self._find()
            if self._file is None:
                return None
        self.file_id = parse_header(os.pread(self._file, HEADER_BYTES, 0))
        if self.file_id is not None:
            self._at = self.settled = max(self.settled, self._reader.replayed_to(self.file_id))
        elif self.finished and self._at < self._size() + HEADER_BYTES:
            size = self._size()
            if size:
                self._reader.damaged(self.path, os.pread(self._file, size, 0), 0, "not the beginning of a spool file")
            self._at = size + HEADER_BYTES
        return self.file_id

    def _find(self) -> int | None:
        for path in (self.path, self.path.with_name(self.name + FINISHED)):
            try:
                return os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                # Finished, and thereby renamed, since the directory was read.
                continue
        return None

    def _size(self) -> int:
        return 0 if self._file is None else os.fstat(self._file).st_size

    def _record(self, file_id: uuid.UUID) -> Taken | None:
        assert self._file is not None
        size = self._size()
        while self._at < size:
            body = read_frame(self._file, self._at, size, file_id)
            if body is not None:
                end = self._at + FRAME_BYTES + len(body)
                record = readable(body)
                if record is not None:
                    return Taken(self, file_id, record, end - self._at, end)
                self._keep_damaged(end, "a record of a version this server does not know")
            elif not self.finished:
                # Its worker may be writing it at this moment.
                return None
            else:
                end = find_frame(self._file, self._at, size, file_id)
                self._keep_damaged(end, "not a whole record" if end < size else "the torn end of the file")
        return None

    def _keep_damaged(self, end: int, what: str) -> None:
        assert self._file is not None
        content = os.pread(self._file, end - self._at, self._at)
        self._reader.damaged(self.path, content, self._at, what)
        self._at = end
