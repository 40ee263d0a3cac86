"""How tasks read: at what pace."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from queen.spark.source.reading import paced


@pytest.mark.parametrize(("share", "factor"), [(0.5, 2.0), (0.25, 6.0)])
def test_a_limited_read_pauses_in_proportion_to_what_it_and_others_for_it_worked(share: float, factor: float) -> None:
    # Batches that take 0.25 s, in which Spark has its part: work between two pauses is longer than that.
    pauses = pauses_of(7, 0.25, share)
    assert pauses == [pytest.approx(0.5 * factor)] * 3 + [pytest.approx(0.25 * factor)]


def test_a_pause_is_no_longer_than_a_minute() -> None:
    assert pauses_of(2, 2.0, 0.01) == [60.0, 60.0, 0.0]


def pauses_of(batches: int, seconds: float, share: float) -> list[float]:
    now = 0.0
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    def reading() -> Iterator[pa.RecordBatch]:
        nonlocal now
        for number in range(batches):
            now += seconds / 2
            yield pa.record_batch({"n": [number]})

    def clock() -> float:
        return now

    read = []
    for batch in paced(reading(), share, clock, sleep):
        read += batch["n"].to_pylist()
        # What Spark does with it.
        now += seconds / 2
    assert read == list(range(batches))
    return pauses
