"""The spool of a host as one of its workers sees it."""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from pathlib import Path

import msgspec

from queen.files import try_lock
from queen.spool.files import directories, left_records, make_directory, spool_files
from queen.spool.quarantine import FailedRecords
from queen.spool.reader import SpoolReader
from queen.spool.shared_state import SharedSpoolState
from queen.spool.writer import SpoolWriter


class SpoolStats(msgspec.Struct, frozen=True):
    """The spool of the host, the same from each of its workers."""

    records: int
    """Records that wait to be stored in PostgreSQL."""
    messages: int
    """Messages in them."""
    bytes: int
    """Bytes they take on disk."""
    oldest_seconds: float
    """Age of the oldest; 0 when nothing waits."""
    spooled_messages: int
    """Messages written to the spool since the server was started."""
    replayed_messages: int
    """Messages that were stored in PostgreSQL, or quarantined, since the server was started."""
    replay_per_second: int
    """Messages stored per second in the last drain."""
    failed_records: int
    """Records in quarantine (`failed/`): PostgreSQL, or the queue, refused them."""
    failed_bytes: int
    damaged: int
    """Byte ranges that were no whole records, kept in `damaged/`, since the server was started."""
    refused: int
    """Requests refused because the spool was full, since the server was started."""
    healthy: bool
    """Whether the last write of this worker succeeded."""


log = logging.getLogger(__name__)

_IDLE_SECONDS = 1.0


class Spool:
    """Files under one directory: written by every worker, drained by one of them at a time."""

    @classmethod
    def open(
        cls, root: Path, spare: Path, *, records_per_file: int, most_bytes: int, most_messages: int | None = None
    ) -> Spool:
        """Use a directory. When that fails, the spool is one in `spare` that refuses every record with the reason."""
        make = partial(cls, records_per_file=records_per_file, most_bytes=most_bytes, most_messages=most_messages)
        try:
            return make(root)
        except OSError as error:
            reason = f"the spool in {root} cannot be used ({error.strerror or error})"
            log.error("%s: pushes that need it are refused", reason)
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
        self.state = SharedSpoolState(root)
        self.state.join(lambda: left_records(root))
        self.writer = SpoolWriter(
            root,
            self.state,
            records_per_file=records_per_file,
            most_bytes=most_bytes,
            idle_seconds=_IDLE_SECONDS,
            most_messages=most_messages,
            unusable=unusable,
        )
        self.reader = SpoolReader(root, self.state)
        self.failed = FailedRecords(root)

    def may_replay(self) -> bool:
        """Whether this process drains the spool; once it does, it does so until it ends."""
        self._replaying = self._replaying or try_lock(self._replay_lock)
        return self._replaying

    @property
    def replays(self) -> bool:
        """Whether this process drains the spool, as far as it has tried."""
        return self._replaying

    def file_names(self) -> set[str]:
        """The ids of all files, whichever process writes them."""
        return {path.name.partition(".")[0] for home in directories(self._root) for path in spool_files(home)}

    def stats(self) -> SpoolStats:
        state = self.state
        failed, failed_bytes = self.failed.count()
        return SpoolStats(
            records=state.records,
            messages=state.messages,
            bytes=state.nbytes,
            oldest_seconds=max(0.0, time.time() - state.oldest_at) if state.records else 0.0,
            spooled_messages=state.spooled,
            replayed_messages=state.replayed,
            replay_per_second=state.rate,
            failed_records=failed,
            failed_bytes=failed_bytes,
            damaged=state.damaged,
            refused=state.refused,
            healthy=self.writer.healthy,
        )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self.writer.close()
        self.reader.close()
        os.close(self._replay_lock)
        self.state.close()
