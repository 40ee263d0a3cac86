"""The segment cache: hands out what it has, whole, and never a span with a hole in it."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from queen.log.segments import SegmentCache
from queen.wire.ids import IdSource
from queen.wire.segment import Segment, pack_segment

NOW = datetime.now(UTC)
IDS = IdSource()


def segment(base: int, count: int, payload: bytes = b"1") -> Segment:
    ids = [msgspec.json.encode(f"{base + index:06d}") for index in range(count)]
    return Segment(base, NOW, IDS.block(count), pack_segment(ids, [payload] * count))


def test_a_span_is_served_by_the_segments_that_overlap_it() -> None:
    cache = SegmentCache(1 << 20)
    several = [segment(0, 5), segment(5, 5), segment(10, 5)]
    cache.put(1, several)
    assert cache.get(1, 0, 15) == several
    assert cache.get(1, 5, 10) == several[1:2]
    assert cache.get(1, 4, 6) == several[:2]
    assert cache.get(1, 14, 15) == several[2:]
    assert cache.span(1) == (0, 15)


def test_a_span_that_is_not_wholly_here_is_not_served() -> None:
    cache = SegmentCache(1 << 20)
    cache.put(1, [segment(5, 5)])
    assert cache.get(1, 4, 6) is None
    assert cache.get(1, 9, 11) is None
    assert cache.get(2, 5, 6) is None
    assert cache.span(2) == (0, 0)


def test_a_gap_starts_the_run_over_and_known_segments_are_not_added_twice() -> None:
    cache = SegmentCache(1 << 20)
    cache.put(1, [segment(0, 5)])
    size = cache.nbytes
    cache.put(1, [segment(0, 5)])
    assert cache.nbytes == size
    cache.put(1, [segment(10, 5)])
    assert cache.span(1) == (10, 15)
    assert cache.nbytes == size


def test_the_least_used_partition_gives_way_its_oldest_segment_first() -> None:
    one = segment(0, 10).nbytes
    cache = SegmentCache(4 * one)
    cache.put(1, [segment(0, 10), segment(10, 10)])
    cache.put(2, [segment(0, 10), segment(10, 10)])
    assert cache.get(1, 0, 1) is not None
    cache.put(3, [segment(0, 10)])
    assert cache.span(2) == (10, 20)
    assert cache.span(1) == (0, 20)
    assert cache.nbytes <= 4 * one


def test_a_segment_larger_than_the_cache_is_not_kept() -> None:
    cache = SegmentCache(1000)
    cache.put(1, [segment(0, 1, b'"' + b"x" * 5000 + b'"')])
    assert cache.nbytes == 0
    assert cache.span(1) == (0, 0)


def test_a_cache_of_no_size_keeps_nothing() -> None:
    cache = SegmentCache(0)
    cache.put(1, [segment(0, 1)])
    assert cache.get(1, 0, 1) is None


def test_a_forgotten_partition_is_gone_with_its_bytes() -> None:
    cache = SegmentCache(1 << 20)
    cache.put(1, [segment(0, 5)])
    cache.forget(1)
    cache.forget(1)
    assert cache.nbytes == 0
    assert cache.get(1, 0, 1) is None


steps = st.lists(
    st.tuples(st.sampled_from(["put", "get", "forget"]), st.integers(1, 3), st.integers(0, 60), st.integers(1, 20)),
    max_size=40,
)


@given(steps, st.integers(1000, 20_000))
def test_whatever_happens_what_is_served_is_whole_and_memory_is_bounded(
    several: list[tuple[str, int, int, int]], capacity: int
) -> None:
    cache = SegmentCache(capacity)
    for what, partition, start, length in several:
        if what == "put":
            cache.put(partition, [segment(start, length)])
        elif what == "forget":
            cache.forget(partition)
        else:
            found = cache.get(partition, start, start + length)
            if found is not None:
                assert found[0].base_offset <= start
                assert found[-1].end_offset >= start + length
                assert all(one.end_offset == next.base_offset for one, next in itertools.pairwise(found))
        assert 0 <= cache.nbytes <= capacity


def test_of_a_backlog_the_segment_read_last_is_kept_beside_the_newest() -> None:
    cache = SegmentCache(1 << 20)
    newest, old = segment(100, 5), [segment(0, 5), segment(5, 5)]
    cache.put(1, [newest])
    cache.put_read(1, old)
    assert cache.span(1) == (5, 10)
    assert cache.get(1, 6, 9) == old[1:]
    assert cache.get(1, 4, 6) is None
    assert cache.get(1, 100, 105) == [newest]
    cache.forget(1)
    assert cache.get(1, 6, 9) is None
