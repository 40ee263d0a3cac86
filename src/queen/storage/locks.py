"""The advisory locks of a database, side by side, so that no two purposes share a number."""

from __future__ import annotations

from enum import IntEnum


class AdvisoryLock(IntEnum):
    """What somebody does alone, on one database."""

    MIGRATION = 0x5175_6565_6E00
    BACKGROUND_JOBS = 0x5175_6565_6E01
    MOVE = 0x5175_6565_6E02
    BECOMING_A_SHARD = 0x5175_6565_6E03
