"""A lock between processes: tests run in several, and some of what they need is installed once for all."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file; it stays, because one who waits for it has it open."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
