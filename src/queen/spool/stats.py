"""The state of the spool in numbers."""

from __future__ import annotations

import msgspec


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
