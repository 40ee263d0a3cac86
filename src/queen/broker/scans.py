"""Scanning a queue for partitions that have something for a group: fills a lane at first, corrects it later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from queen.broker.lanes import Holds, Lane
from queen.storage.database import Fetcher

SCAN_PAGE = 10_000
_ENOUGH_READY = 50_000


async def scan_lane(database: Fetcher, lane: Lane, holds: Holds, on_page: Callable[[], None]) -> None:
    """Read which partitions have something: all pages the first time, the next page after that."""
    loop = asyncio.get_running_loop()
    whole = lane.scanned_at is None
    after = lane.scan_after
    total = 0
    while True:
        rows = await database.fetch("ready_partitions", lane.queue_id, lane.group_id, after, SCAN_PAGE, lane.since)
        (page,) = await database.fetch("partition_page_end", lane.queue_id, after, SCAN_PAGE)
        now = loop.time()
        for row in rows:
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


def _note(lane: Lane, holds: Holds, partition_id: int, available: int, held_for: float, now: float) -> None:
    if partition_id in lane.claiming or partition_id in lane.ready:
        return
    if held_for > 0:
        if partition_id not in lane.held:
            holds.add(lane, partition_id, now + held_for)
            lane.fed.add(partition_id)
    elif partition_id not in lane.held:
        lane.ready[partition_id] = available
    elif lane.held[partition_id] - now > 0.05 and partition_id not in lane.undue:
        # Freed by somebody who could not tell us.
        lane.free(partition_id, available)
