"""How tasks read: at what pace."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from queen.spark.source.reading import paced


@pytest.mark.parametrize(("share", "pause"), [(0.5, 3.0), (0.25, 9.0), (0.01, 60.0)])
def test_a_limited_read_pauses_in_proportion_to_what_each_batch_took(share: float, pause: float) -> None:
    now = 0.0
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    def reading() -> Iterator[pa.RecordBatch]:
        nonlocal now
        for number in range(3):
            now += 1.0
            yield pa.record_batch({"n": [number]})

    def clock() -> float:
        return now

    read = []
    for batch in paced(reading(), share, clock, sleep):
        read += batch["n"].to_pylist()
        # What Spark does with it.
        now += 2.0
    assert read == [0, 1, 2]
    assert pauses == [pytest.approx(pause)] * 3
