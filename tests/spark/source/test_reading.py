"""How a read leaves room for others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pyarrow as pa
import pytest

from queen.spark.source.logs import Span
from queen.spark.source.reading import paced

Piece = list[tuple[int, int, int]]


@pytest.mark.parametrize(("share", "factor"), [(0.5, 2.0), (0.25, 6.0)])
def test_a_limited_read_pauses_in_proportion_to_what_it_and_others_for_it_worked(share: float, factor: float) -> None:
    # 25 microseconds for each message, in which Spark has its part.
    pieces, pauses = read_paced([100_000], 25e-6, share)
    ends = [0, 10_000, 30_000, 50_000, 70_000, 90_000, 100_000]
    assert pieces == [[(0, *bounds)] for bounds in pairwise(ends)]
    assert pauses == [pytest.approx(worked * factor) for worked in (0.25, 0.5, 0.5, 0.5, 0.5, 0.25)]


def test_pieces_go_over_the_ends_of_partitions_and_hold_every_offset_once() -> None:
    pieces, _ = read_paced([4_000, 0, 1, 20_000, 3], 1e-6, 0.5)
    assert pieces == [[(0, 0, 4_000), (1, 0, 0), (2, 0, 1), (3, 0, 5_999)], [(3, 5_999, 20_000), (4, 0, 3)]]


def test_large_messages_are_read_in_small_pieces() -> None:
    pieces, _ = read_paced([10_010], 0.2, 0.5)
    assert pieces == [[(0, 0, 10_000)], *([(0, at, at + 2)] for at in range(10_000, 10_010, 2))]


def test_a_pause_is_no_longer_than_a_minute() -> None:
    _, pauses = read_paced([10_000, 1], 2e-4, 0.01)
    assert pauses[0] == 60.0


def test_nothing_to_read_is_no_pause() -> None:
    assert read_paced([], 1.0, 0.5) == ([], [])


def read_paced(counts: Sequence[int], seconds: float, share: float) -> tuple[list[Piece], list[float]]:
    """The pieces that are read of partitions with so many messages, each of which takes some time; and the pauses."""
    now = 0.0
    pieces: list[Piece] = []
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    def read(spans: Sequence[Span]) -> Iterator[pa.RecordBatch]:
        nonlocal now
        pieces.append([(span.id, span.start, span.end) for span in spans])
        for span in spans:
            now += span.count * seconds / 2
            yield pa.record_batch({"n": pa.array(range(span.start, span.end), pa.int64())})

    def clock() -> float:
        return now

    spans = [Span("q", str(id), 0, id, 0, count) for id, count in enumerate(counts)]
    found = 0
    for batch in paced(read, spans, share, clock, sleep):
        found += batch.num_rows
        # What Spark does with it.
        now += batch.num_rows * seconds / 2
    assert found == sum(counts)
    return pieces, pauses
