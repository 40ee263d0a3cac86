"""From a time to an offset: messages of a partition are stored in the order of their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from queen.storage.database import Fetcher


@dataclass(frozen=True, slots=True)
class Moment:
    """A time, looked for among the offsets `low` to `high` of a partition."""

    partition_id: int
    low: int
    high: int
    time: datetime


async def offsets_after(fetcher: Fetcher, moments: Sequence[Moment]) -> list[int]:
    """For each moment the first offset whose message was stored after it; `high` when there is none.

    PostgreSQL bisects: the cost grows with the logarithm of what the partition holds.
    """
    if not moments:
        return []
    rows = await fetcher.fetch(
        "offsets_after",
        [moment.partition_id for moment in moments],
        [moment.low for moment in moments],
        [moment.high for moment in moments],
        [moment.time for moment in moments],
    )
    offsets = [moment.high for moment in moments]
    for row in rows:
        offsets[row["slot"] - 1] = row["first_offset"]
    return offsets
