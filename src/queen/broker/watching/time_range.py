"""From when to when, and in how many pieces."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from queen.wire.times import iso_millis

_BUCKETS: Final = ((60, 1), (6 * 60, 5), (24 * 60, 15), (7 * 24 * 60, 60))
_LARGEST_BUCKET: Final = 360


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A stretch of time, cut into buckets whose size follows from its length."""

    since: datetime
    until: datetime

    @property
    def bucket_minutes(self) -> int:
        minutes = (self.until - self.since) / timedelta(minutes=1)
        return next((size for longest, size in _BUCKETS if minutes <= longest), _LARGEST_BUCKET)

    def seconds_in(self, bucket: datetime) -> float:
        """How much of a bucket is over: what happened in it is divided by that to get a rate."""
        return max(1.0, min(self.bucket_minutes * 60, (datetime.now(UTC) - bucket).total_seconds()))

    def show(self) -> dict[str, Any]:
        return {"from": iso_millis(self.since), "to": iso_millis(self.until)}
