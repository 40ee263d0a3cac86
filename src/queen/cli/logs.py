"""Log lines on standard error, for people or for machines."""

import logging
from datetime import UTC, datetime

import msgspec

from queen.settings import LogEncoding, LogLevel

TRACE = 5
_LEVELS: dict[LogLevel, int] = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}


def configure_logging(level: LogLevel, encoding: LogEncoding, process: str) -> None:
    """Send what this process logs to standard error, marked with the name `process`."""
    logging.addLevelName(TRACE, "TRACE")
    logging.addLevelName(logging.WARNING, "WARN")
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter(process) if encoding == "json" else _TextFormatter(process))
    logging.basicConfig(level=_LEVELS[level], handlers=[handler], force=True)


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-5s {process}: %(message)s", datefmt="%H:%M:%S")


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()
