"""Room on disk for what memory has no room for and no crash need leave behind."""

from __future__ import annotations

import mmap
import shutil
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_LEAVE_FREE: Final = 1 << 30
"""Bytes of the disk that are for others: PostgreSQL and the spool may be on it."""
_PIECE: Final = 512 << 10
"""Bytes that are written in one go: few enough for everybody else to wait for."""


class Overflow:
    """Files without a name, which end with the process. What is read often stays in the memory the kernel has to spare.

    Takes `most_bytes` at most, and nothing while the disk is nearly full.
    """

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._directory = directory
        self._most_bytes = most_bytes
        self.nbytes = 0

    def begin(self, data: Bytes) -> Move:
        """Begin to move bytes to the disk. Raises `OSError` when it has no room for them."""
        if self.nbytes + data.nbytes > self._most_bytes:
            raise OSError(f"the {self._most_bytes >> 20} MB on disk are full")
        self._directory.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(self._directory).free < data.nbytes + _LEAVE_FREE:
            raise OSError(f"less than {_LEAVE_FREE >> 20} MB would be left free in {self._directory}")
        move = Move(data, self._directory)
        self.nbytes += data.nbytes
        return move

    def drop(self, data: Bytes) -> None:
        """Bytes are not used any more: their place on disk is free once the last reference to them is gone."""
        self.nbytes -= data.nbytes


class Move:
    """Bytes on their way to the disk, piece by piece."""

    def __init__(self, data: Bytes, directory: Path) -> None:
        self._data = data
        self._written = 0
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 (closed by `end`)

    def step(self) -> Bytes | None:
        """Write the next piece; returns the bytes, only to be read, once all of them are there. May raise `OSError`."""
        if self._written < self._data.nbytes:
            self._written += self._file.write(self._data[self._written : self._written + _PIECE].data)
            return None
        view = mmap.mmap(self._file.fileno(), self._data.nbytes, access=mmap.ACCESS_READ)
        # Probes are anywhere: what lies around them is not worth reading.
        view.madvise(mmap.MADV_RANDOM)
        self.end()
        return np.frombuffer(view, dtype=np.uint8)

    def end(self) -> None:
        self._file.close()
