"""A directory of Parquet files with atomic commits: a process may be killed at any time.

    queue=orders/date=2026-11-15/hour=14/00000012-0.parquet
    _manifest/00000012.json     what commit 12 added and removed
    _manifest/00000012.intent   the same, while its files are being moved to their places
    _manifest/snapshot.json     all commits up to some number, summed up
    _staging/                   files that are not committed

Files are written to `_staging`, which readers of Parquet pass over. The intent is the point of no return: the next
process that opens the directory completes it. Files are moved as a whole, so a reader of the plain directory never
sees half of one, nor a batch twice. Readers of the manifest see all files of a commit or none.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from queen.files import sync, try_lock
from queen.pipelines.errors import ArchiveError

_SNAPSHOT: Final = "snapshot.json"
_SNAPSHOT_EVERY: Final = 50
_ORPHAN_SECONDS: Final = 24 * 3600.0
_READERS_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.05

T = TypeVar("T")


class DataFile(msgspec.Struct, frozen=True, rename="camel"):
    """A file of rows; `path` is within the directory."""

    path: str
    rows: int
    bytes: int
    commit: int = 0


class Commit(msgspec.Struct, frozen=True, rename="camel"):
    """What one commit changed. `staged` has, for each added file, where it was written."""

    number: int
    writer: str
    batch: int
    at: float
    added: list[DataFile]
    staged: list[str]
    removed: list[str]


class Snapshot(msgspec.Struct, frozen=True, rename="camel"):
    """The files as of a commit. `batches`: the last batch of each writer."""

    number: int = 0
    files: list[DataFile] = []
    batches: dict[str, int] = {}

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def after(self, commit: Commit) -> Snapshot:
        removed = set(commit.removed)
        files = [file for file in self.files if file.path not in removed] + commit.added
        return Snapshot(commit.number, files, self.batches | {commit.writer: commit.batch})


class Manifest:
    """The commits of one directory. Several processes may use it; a lock makes them commit one after the other."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._log = self.root / "_manifest"

    @property
    def exists(self) -> bool:
        return self._log.is_dir()

    def create(self) -> None:
        self._log.mkdir(parents=True, exist_ok=True)

    def staging(self) -> Path:
        """A directory of its own for files that are to be committed; not made yet."""
        return self.root / "_staging" / uuid.uuid4().hex

    def snapshot(self) -> Snapshot:
        """What is committed now."""
        with self.reading() as snapshot:
            return snapshot

    def last_batch(self, writer: str) -> int | None:
        """The last batch that a writer committed."""
        return self.snapshot().batches.get(writer)

    def commit(
        self, writer: str, batch: int, staged: Path | None, rows: Sequence[int], removed: Sequence[str] = ()
    ) -> Snapshot:
        """Add the files under `staged` (with so many rows, in the order of `staged_files`), and drop others, at once.

        A batch that the writer has committed before changes nothing: it is a repetition after a crash.
        """
        alone = bool(removed)
        with self._without_readers() if alone else nullcontext(), self._writing(alone):
            current = self._read()
            if batch <= current.batches.get(writer, -1):
                _discard(staged)
                return current
            gone = set(removed) - {file.path for file in current.files}
            if gone:
                raise ArchiveError(f"{self.root}: {len(gone)} files were replaced by another process meanwhile")
            commit = self._prepared(current.number + 1, writer, batch, staged, rows, list(removed))
            _write_durably(self._path(commit.number, "intent"), msgspec.json.encode(commit))
            self._finish(commit)
            after = current.after(commit)
            if commit.number % _SNAPSHOT_EVERY == 0:
                self._sum_up(after)
        _discard(staged)
        return after

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        """What is committed now; its files stay in place while they are read."""
        if not self.exists:
            raise ArchiveError(f"{self.root} is not an archive: it has no _manifest")
        while True:
            with self._lock("readers", fcntl.LOCK_SH):
                if not self._abandoned():
                    yield self._read()
                    return
            self._recover()

    def collect_orphans(self, older_than: float = _ORPHAN_SECONDS) -> int:
        """Remove what runs that were killed left in `_staging`; returns how many."""
        removed = 0
        with self._writing():
            for left in (self.root / "_staging").glob("*"):
                if left.stat().st_mtime < time.time() - older_than:
                    shutil.rmtree(left)
                    removed += 1
        return removed

    def _prepared(
        self, number: int, writer: str, batch: int, staged: Path | None, rows: Sequence[int], removed: list[str]
    ) -> Commit:
        files = staged_files(staged) if staged is not None else []
        added = []
        for index, (file, count) in enumerate(zip(files, rows, strict=True)):
            assert staged is not None
            sync(file)
            place = file.relative_to(staged).parent / f"{number:08d}-{index}.parquet"
            added.append(DataFile(str(place), count, file.stat().st_size, number))
        within = [str(file.relative_to(self.root)) for file in files]
        return Commit(number, writer, batch, time.time(), added, within, removed)

    def _finish(self, commit: Commit) -> None:
        """Move files to where the intent says they belong; may be done again after a crash."""
        # Old files are removed first: readers of the plain directory may miss rows for a moment, but see none twice.
        for path in commit.removed:
            (self.root / path).unlink(missing_ok=True)
        folders = set()
        for file, staged in zip(commit.added, commit.staged, strict=True):
            source, target = self.root / staged, self.root / file.path
            if source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                source.rename(target)
            folders.add(target.parent)
        for folder in folders:
            sync(folder)
        self._path(commit.number, "intent").rename(self._path(commit.number, "json"))
        sync(self._log)

    def _read(self) -> Snapshot:
        while True:
            found = _read(self._log / _SNAPSHOT, Snapshot) or Snapshot()
            numbers = sorted(int(path.stem) for path in self._log.glob("[0-9]*.json"))
            commits = [_read(self._path(number, "json"), Commit) for number in numbers if number > found.number]
            # One that vanished meanwhile is part of a newer snapshot.
            if all(commits):
                for commit in commits:
                    assert commit is not None
                    found = found.after(commit)
                return found

    def _sum_up(self, snapshot: Snapshot) -> None:
        _write_durably(self._log / _SNAPSHOT, msgspec.json.encode(snapshot))
        for path in self._log.glob("[0-9]*.json"):
            if int(path.stem) <= snapshot.number:
                path.unlink()

    def _abandoned(self) -> bool:
        """Whether a writer died after its intent. One that is alive holds the lock of writers."""
        return any(self._log.glob("*.intent")) and self._free("writer") and any(self._log.glob("*.intent"))

    def _recover(self) -> None:
        with self._lock("readers", fcntl.LOCK_EX), self._writing(alone=True):
            pass

    @contextmanager
    def _writing(self, alone: bool = False) -> Iterator[None]:
        """One writer at a time, with nothing left half done by another; that needs to be finished without readers."""
        while True:
            with self._lock("writer", fcntl.LOCK_EX):
                intents = sorted(self._log.glob("*.intent"))
                if alone or not intents:
                    for commit in filter(None, (_read(path, Commit) for path in intents)):
                        self._finish(commit)
                    yield
                    return
            self._recover()

    @contextmanager
    def _without_readers(self) -> Iterator[None]:
        """Excludes readers. Taken before the lock of writers, so that writers that only add never wait for readers."""
        with (self._log / "readers.lock").open("a") as file:
            deadline = time.monotonic() + _READERS_SECONDS
            while not try_lock(file.fileno()):
                if time.monotonic() > deadline:
                    raise ArchiveError(f"{self.root} is being read, and its files have to stay: try again later")
                time.sleep(_POLL_SECONDS)
            yield

    @contextmanager
    def _lock(self, name: str, kind: int) -> Iterator[None]:
        with (self._log / f"{name}.lock").open("a") as file:
            fcntl.flock(file, kind)
            yield

    def _free(self, name: str) -> bool:
        with (self._log / f"{name}.lock").open("a") as file:
            return try_lock(file.fileno(), fcntl.LOCK_SH)

    def _path(self, number: int, suffix: str) -> Path:
        return self._log / f"{number:08d}.{suffix}"


def staged_files(staged: Path) -> list[Path]:
    """The Parquet files that a writer has staged, in a fixed order."""
    return sorted(staged.rglob("*.parquet")) if staged.is_dir() else []


def _discard(staged: Path | None) -> None:
    if staged is not None and staged.exists():
        shutil.rmtree(staged)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ArchiveError(f"{path} cannot be read: {error}") from error


def _write_durably(path: Path, content: bytes) -> None:
    fresh = path.with_name(f"{path.name}.tmp")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
    sync(path.parent)
