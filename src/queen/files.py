"""Files that processes of a host share: locks, memory that all of them map, and names that survive a crash."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path


def share(path: Path, size: int) -> mmap.mmap:
    """Map `size` bytes of a file, shared by every process that maps it; zero until written."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # Not truncated to that length: where the disk has no room for a page, writing to it would kill the process.
        os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def try_lock(file: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Whether an open file could be locked; the kernel releases the lock when it is closed or its process dies."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sync(path: Path) -> None:
    """Fsync a file, or a directory: then the names in it are as durable as its files."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def replace(path: Path, content: bytes) -> None:
    """Write a whole file atomically: readers see the old content or the new one. Nothing is synced to the disk."""
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    draft.replace(path)
