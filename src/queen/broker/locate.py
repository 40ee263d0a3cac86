"""Finding a message by its transaction id."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from queen.broker.dedup import Fetcher
from queen.broker.seen import transaction_hash

_PAGE = 500


async def leased_offsets(
    fetcher: Fetcher, cursors: Collection[tuple[int, int]]
) -> dict[tuple[int, int], dict[int, int]]:
    """For (partition, group) pairs: hash of transaction id -> offset, over the span they lease."""
    rows = await fetcher.fetch("leased_ids", [pid for pid, _ in cursors], [gid for _, gid in cursors])
    spans: dict[tuple[int, int], dict[int, int]] = {}
    for row in rows:
        hashes = np.frombuffer(row["ids"], dtype="<u8", offset=16).tolist()
        base, start, end = row["base_offset"], row["lease_start"], row["lease_end"]
        span = spans.setdefault((row["partition_id"], row["group_id"]), {})
        for offset, value in enumerate(hashes, base):
            if start <= offset < end:
                span[value] = offset
    return spans


async def locate(fetcher: Fetcher, partition_id: int, transaction_ids: Collection[str]) -> dict[str, int]:
    """Offsets of messages by transaction id, searched from the newest; those not found are absent."""
    wanted = {transaction_hash(id, partition_id): id for id in transaction_ids}
    targets = np.fromiter(wanted, dtype=np.uint64, count=len(wanted))
    found: dict[str, int] = {}
    before = 1 << 62
    while True:
        page = await fetcher.fetch("segment_ids_before", partition_id, before, _PAGE, 0.0)
        for row in page:
            hashes = np.frombuffer(row["ids"], dtype="<u8", offset=16)
            for index in np.flatnonzero(np.isin(hashes, targets)):
                found.setdefault(wanted[int(hashes[index])], row["base_offset"] + int(index))
        if len(page) < _PAGE or len(found) == len(wanted):
            return found
        before = page[-1]["base_offset"]
