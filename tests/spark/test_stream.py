"""Following queues."""

from __future__ import annotations

import json
from pathlib import Path

from pyspark.sql import Row

from tests.api import Api
from tests.spark.conftest import Read, drain


async def test_a_stream_goes_on_where_its_checkpoint_ends_and_finds_new_partitions(
    api: Api, read: Read, tmp_path: Path
) -> None:
    await api.push("orders", 0, 1, 2)
    first = await drain(read.stream("orders", startingOffsets="earliest"), tmp_path / "checkpoint")
    nothing = await drain(read.stream("orders", startingOffsets="earliest"), tmp_path / "checkpoint")
    await api.push("orders", 3)
    await api.push("orders", 4, 5, partition="eu")
    second = await drain(read.stream("orders", startingOffsets="earliest"), tmp_path / "checkpoint")

    assert numbers(first) == [0, 1, 2]
    assert numbers(nothing) == []
    assert numbers(second) == [3, 4, 5]


async def test_a_stream_takes_no_more_than_its_limit_per_batch(api: Api, read: Read, tmp_path: Path) -> None:
    await api.push("orders", *range(7))
    await api.push("orders", 7, partition="eu")
    rows = await drain(read.stream("orders", startingOffsets="earliest", maxRowsPerBatch="3"), tmp_path / "checkpoint")

    assert numbers(rows) == list(range(8))
    offsets = [
        json.loads(path.read_text().splitlines()[2]) for path in (tmp_path / "checkpoint" / "offsets").glob("[0-9]*")
    ]
    assert len(offsets) == 3


def numbers(rows: list[Row]) -> list[int]:
    return sorted(int(row.payload) for row in rows)
