"""A clock of the machine that never steps, and what PostgreSQL's clock said when it showed a time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Names the run of the machine in which `ticks` of its processes can be compared; empty where there is no name."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def ticks() -> float:
    """Seconds by the clock that never steps; every process of the machine sees the same."""
    return time.monotonic()


class ServerTime:
    """Tells what PostgreSQL's clock showed at a moment of the past, steadily: of two moments the later is later."""

    def __init__(self) -> None:
        self._boot = boot_id()
        self._ahead: float | None = None

    @property
    def known(self) -> bool:
        return self._ahead is not None

    def learn(self, at: float, sent: float, received: float) -> None:
        """PostgreSQL said `at`, in seconds since 1970, between two moments in ticks."""
        most = at - sent
        if self._ahead is None or self._ahead < at - received:
            # Its clock was set, or has drifted: there is no use in what was known before.
            self._ahead = most
        else:
            self._ahead = min(self._ahead, most)

    def at(self, boot: str, moment: float, wall: float) -> float:
        """Seconds since 1970 by PostgreSQL's clock; `wall` is the same moment by a clock that may have been set."""
        assert self._ahead is not None
        if boot and boot == self._boot:
            return self._ahead + moment
        # From before the machine was started: only the other clock has gone on.
        return self._ahead + ticks() - max(0.0, time.time() - wall)
