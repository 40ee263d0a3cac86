"""Memory that the processes of a host share, by the name of a file."""

from __future__ import annotations

import mmap
import os
from pathlib import Path


def share(path: Path, size: int) -> mmap.mmap:
    """Map so many bytes of a file, shared by every process that maps it; zero until written."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # Not truncated to that length: where the disk has no room for a page, writing to it would kill the process.
        os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)
