"""What a running stream has done so far."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


class Metrics:
    """Counters by the names that every Queen SDK gives them."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(
            (
                "cyclesTotal",
                "flushCyclesTotal",
                "messagesTotal",
                "pushItemsTotal",
                "stateOpsTotal",
                "lateEventsTotal",
                "errorsTotal",
                "gateAllowsTotal",
                "gateDenialsTotal",
            ),
            0,
        )
        self._last: dict[str, str | None] = dict.fromkeys(("lastCycleAt", "lastFlushAt", "lastError"))

    def add(self, **counts: int) -> None:
        for name, count in counts.items():
            self._counts[name] += count

    def happened(self, name: str) -> None:
        """Note that it happened now."""
        self._last[name] = datetime.now(UTC).isoformat().replace("+00:00", "Z")

    def failed(self, error: BaseException) -> None:
        self._counts["errorsTotal"] += 1
        self._last["lastError"] = str(error) or type(error).__name__

    def snapshot(self) -> dict[str, Any]:
        return {**self._counts, **self._last}
