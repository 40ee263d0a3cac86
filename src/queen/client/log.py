"""What the client tells about itself.

Warnings always go to the logger `queen.client`. With QUEEN_CLIENT_LOG=true every step is printed as a line:
[2026-10-28T10:30:45.123Z] [INFO] [QueueBuilder.push] {"queue":"tasks","count":5}
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

from queen.wire.times import iso_millis

VARIABLE = "QUEEN_CLIENT_LOG"

_logger = logging.getLogger("queen.client")


class ClientLog:
    """Reads the variable once, when the client is made. On hot paths look at `enabled` before calling."""

    __slots__ = ("enabled",)

    def __init__(self) -> None:
        self.enabled = os.environ.get(VARIABLE, "").lower() == "true"

    def info(self, where: str, **details: Any) -> None:
        if self.enabled:
            print(_line("INFO", where, details), file=sys.stdout)

    def warning(self, where: str, text: str, **details: Any) -> None:
        """Something that a person should know and the program goes on from."""
        if self.enabled:
            print(_line("WARN", where, {"message": text, **details}), file=sys.stderr)
        else:
            _logger.warning("%s: %s%s", where, text, f" {details}" if details else "")


def _line(level: str, where: str, details: dict[str, Any]) -> str:
    text = msgspec.json.encode(details, enc_hook=str).decode()
    return f"[{iso_millis(datetime.now(UTC))}] [{level}] [{where}] {text}"
