"""One Queen per data directory: a lock that the kernel drops when its holder dies."""

import fcntl
import os
from pathlib import Path

from queen.postgres.errors import EmbeddedPostgresError


class DirectoryLock:
    """A lock on the file `path`, which holds the process id of the holder for people to read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock, or say who has it. Taking it twice is fine."""
        if self._descriptor is not None:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode(errors="replace").strip()
            os.close(descriptor)
            raise EmbeddedPostgresError(
                f"{self._path.parent} is in use by another Queen (process {holder}): stop that one, "
                "or choose another directory with --data-dir or QUEEN_DATA_DIR"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
