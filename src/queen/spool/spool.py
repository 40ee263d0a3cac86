"""The spool of a host as one of its workers sees it."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from functools import partial
from pathlib import Path

import msgspec

from queen.spool.files import directories, left_records, make_directory, spool_files
from queen.spool.quarantine import FailedRecords
from queen.spool.reader import SpoolReader
from queen.spool.shared_state import SharedSpoolState
from queen.spool.writer import SpoolWriter


class SpoolStats(msgspec.Struct, frozen=True):
    """A snapshot of the whole host's spool, the same from each of its workers."""

    records: int
    """Records that wait to be replayed."""
    messages: int
    """Messages in them."""
    bytes: int
    """Bytes they take on disk."""
    oldest_seconds: float
    """Age of the oldest; 0 when nothing waits."""
    spooled_messages: int
    """Messages written to the spool since the server was started."""
    replayed_messages: int
    """Messages of it that have left the spool for PostgreSQL, or were set aside."""
    replay_per_second: int
    """Messages per second in the last round of replay."""
    failed_records: int
    """Records in `failed/`: PostgreSQL, or the queue, refused them."""
    failed_bytes: int
    damaged: int
    """Stretches of bytes that were no whole records, kept in `damaged/`, since the server was started."""
    refused: int
    """Requests that were sent away because no more may wait, since the server was started."""
    healthy: bool
    """Whether the last write of this worker succeeded."""


log = logging.getLogger(__name__)

_IDLE_SECONDS = 1.0


class Spool:
    """Files under one directory: written by every worker, replayed by one of them at a time."""

    @classmethod
    def open(
        cls, root: Path, spare: Path, *, records_per_file: int, most_bytes: int, most_messages: int | None = None
    ) -> Spool:
        """Use a directory. When that cannot be used, the spool is one in `spare` that takes nothing and says why."""
        make = partial(cls, records_per_file=records_per_file, most_bytes=most_bytes, most_messages=most_messages)
        try:
            return make(root)
        except OSError as error:
            reason = f"the spool in {root} cannot be used ({error.strerror or error})"
            log.error("%s: what would have to go there is refused", reason)
            return make(spare, unusable=reason)

    def __init__(
        self,
        root: Path,
        *,
        records_per_file: int,
        most_bytes: int,
        most_messages: int | None = None,
        unusable: str = "",
    ) -> None:
        make_directory(root)
        self._root = root
        self._replay_lock = os.open(root / "replay.lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._replaying = False
        self._closed = False
        self.board = SharedSpoolState(root)
        self.board.join(lambda: left_records(root))
        self.writer = SpoolWriter(
            root,
            self.board,
            records_per_file=records_per_file,
            most_bytes=most_bytes,
            idle_seconds=_IDLE_SECONDS,
            most_messages=most_messages,
            unusable=unusable,
        )
        self.reader = SpoolReader(root, self.board)
        self.failed = FailedRecords(root)

    def may_replay(self) -> bool:
        """Whether this process is the one that replays; it is from the first time it may until it ends."""
        if not self._replaying:
            try:
                fcntl.flock(self._replay_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self._replaying = True
        return True

    @property
    def replays(self) -> bool:
        """Whether this process is known to be the one that replays."""
        return self._replaying

    def file_names(self) -> set[str]:
        """The ids of the files that are there, whoever writes or reads them."""
        return {path.name.partition(".")[0] for home in directories(self._root) for path in spool_files(home)}

    def stats(self) -> SpoolStats:
        board = self.board
        failed, failed_bytes = self.failed.count()
        return SpoolStats(
            records=board.records,
            messages=board.messages,
            bytes=board.nbytes,
            oldest_seconds=max(0.0, time.time() - board.oldest_at) if board.records else 0.0,
            spooled_messages=board.spooled,
            replayed_messages=board.replayed,
            replay_per_second=board.rate,
            failed_records=failed,
            failed_bytes=failed_bytes,
            damaged=board.damaged,
            refused=board.refused,
            healthy=self.writer.healthy,
        )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self.writer.close()
        self.reader.close()
        os.close(self._replay_lock)
        self.board.close()
