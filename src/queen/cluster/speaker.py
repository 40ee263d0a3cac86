"""One worker of each host speaks and listens for it: it has the UDP port, and sends the signs of life."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class Speaker:
    """A lock over the workers that share a directory. The kernel frees it when its holder dies."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "speaker.lock"
        self._file: int | None = None
        self.elected = False

    def stand(self) -> bool:
        """Whether this worker is the one; asks for the lock if it is not."""
        if self.elected:
            return True
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.elected = True
        return True

    def close(self) -> None:
        self.elected = False
        if self._file is not None:
            os.close(self._file)
            self._file = None
