"""Logging to standard error, as text or JSON."""

import logging
import re
import sys
import threading
from copy import copy
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

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

_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")

_log = logging.getLogger("queen")


def configure_logging(level: LogLevel, encoding: LogEncoding, process: str, worker: int | None = None) -> None:
    """Log to standard error, with the name `process` in every line.

    Includes Python warnings and uncaught exceptions.
    """
    logging.addLevelName(TRACE, "TRACE")
    logging.addLevelName(logging.WARNING, "WARN")
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter(process, worker) if encoding == "json" else _TextFormatter(process))
    logging.basicConfig(level=_LEVELS[level], handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-5s {process}: %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().rstrip()
        if _CONTROLS.search(message):
            # Names and paths are what clients send: none may look like another line, or command a terminal.
            record = copy(record)
            record.msg, record.args = _CONTROLS.sub(lambda found: repr(found[0])[1:-1], message), None
        return super().format(record)


class _JsonFormatter(logging.Formatter):
    """One JSON object per line; `extra={"fields": {...}}` of a log call adds fields."""

    def __init__(self, process: str, worker: int | None) -> None:
        super().__init__()
        self._process = process
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": self._process,
            "worker": self._worker,
            "pid": record.process,
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # A lone surrogate, for example in a file name, cannot be encoded as UTF-8 but must not lose the line.
        return msgspec.json.encode(_encodable(line)).decode()


def _encodable(line: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for key, value in line.items()
    }


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    _log.critical("uncaught exception", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_value is not None and not issubclass(failure.exc_type, SystemExit):
        name = failure.thread.name if failure.thread is not None else "unknown"
        _log.critical(
            "uncaught exception in thread %s",
            name,
            exc_info=(failure.exc_type, failure.exc_value, failure.exc_traceback),
        )
