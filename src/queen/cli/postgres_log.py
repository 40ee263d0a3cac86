"""What the embedded PostgreSQL writes to its own log, passed on to ours."""

import logging
import re
from pathlib import Path

_log = logging.getLogger("queen.postgres.server")

# Errors of statements are left out: whoever sent the statement is told, and the text may quote what was sent.
_LEVELS = {
    "PANIC": logging.ERROR,
    "FATAL": logging.WARNING,
    "WARNING": logging.WARNING,
    "LOG": logging.DEBUG,
}
_LINE = re.compile(r"\S+ \S+ \S+ \[\d+\] ([A-Z]+):  (.*)")
_MOST_BYTES = 256 * 1024


class PostgresLog:
    """The lines added to a log file since this was made or last asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = self._size()
        self._begun = b""

    def relay(self) -> None:
        """Log what is new; of very much of it, the end."""
        size = self._size()
        if size < self._position:
            # A new start moved the old file away.
            self._position, self._begun = 0, b""
        if size == self._position:
            return
        if size - self._position > _MOST_BYTES:
            self._position, self._begun = size - _MOST_BYTES, b""
        with self._path.open("rb") as file:
            file.seek(self._position)
            added = file.read(size - self._position)
        self._position += len(added)
        *lines, self._begun = (self._begun + added).split(b"\n")
        for line in lines:
            _relay(line.decode(errors="replace"))

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0


def _relay(line: str) -> None:
    found = _LINE.fullmatch(line)
    if found is not None and found[1] in _LEVELS:
        _log.log(_LEVELS[found[1]], "PostgreSQL: %s", found[2])
