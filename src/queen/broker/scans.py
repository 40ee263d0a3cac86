"""Scanning a queue for partitions that have something for a group: fills a lane at first, corrects it later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from queen.broker.lanes import Holds, Lane
from queen.storage.database import Fetcher, Record

SCAN_PAGE = 10_000
_ENOUGH_READY = 50_000


@dataclass(frozen=True, slots=True)
class Share:
    """Which partitions a worker turns to first, so that those of a host do not all try for the same ones."""

    worker: int = 0
    workers: int = 1

    def is_other(self, row: Record) -> bool:
        return bool(row["id"] % self.workers != self.worker)


async def scan_lane(database: Fetcher, lane: Lane, holds: Holds, share: Share, on_page: Callable[[], None]) -> None:
    """Read which partitions have something: all pages the first time, the next page after that."""
    loop = asyncio.get_running_loop()
    whole = lane.scanned_at is None
    after = lane.scan_after
    total = 0
    while True:
        rows = await database.fetch("ready_partitions", lane.queue_id, lane.group_id, after, SCAN_PAGE, lane.since)
        (page,) = await database.fetch("partition_page_end", lane.queue_id, after, SCAN_PAGE)
        now = loop.time()
        for row in sorted(rows, key=share.is_other):
            _note(lane, holds, row["id"], row["available"], row["held_for"], now)
        total += page["found"]
        finished = page["found"] < SCAN_PAGE
        after = 0 if finished else page["last_id"]
        if finished or len(lane.ready) > _ENOUGH_READY or not whole:
            break
        on_page()
    lane.total_partitions = max(total, lane.total_partitions if lane.scan_after else 0)
    lane.scan_after = after
    lane.scanned_at = loop.time()


async def check_doubted(database: Fetcher, lane: Lane, holds: Holds) -> None:
    """Read which of the partitions that another worker has taken from have something all the same."""
    doubted, lane.doubted = lane.doubted, {}
    partitions = sorted(doubted)
    try:
        for start in range(0, len(partitions), SCAN_PAGE):
            some = partitions[start : start + SCAN_PAGE]
            rows = await database.fetch("ready_among", some, lane.group_id)
            now = asyncio.get_running_loop().time()
            for row in rows:
                _note(lane, holds, row["id"], row["available"], row["held_for"], now)
    except BaseException:
        lane.doubted = doubted | lane.doubted
        raise


def _note(lane: Lane, holds: Holds, partition_id: int, available: int, held_for: float, now: float) -> None:
    if partition_id in lane.claiming or partition_id in lane.ready:
        return
    if held_for > 0:
        if partition_id not in lane.held:
            holds.add(lane, partition_id, now + held_for)
            lane.fed.add(partition_id)
    elif partition_id not in lane.held:
        lane.ready[partition_id] = available
        lane.doubted.pop(partition_id, None)
    elif lane.held[partition_id] - now > 0.05 and partition_id not in lane.undue:
        # Freed by somebody who could not tell us.
        lane.free(partition_id, available)
