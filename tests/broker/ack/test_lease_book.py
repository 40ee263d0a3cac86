"""The book of leases: which offset each transaction id of a delivery has."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from queen.broker.ack.leases import Lease, LeaseBook
from queen.wire.ids import IdSource
from queen.wire.segment import Segment, pack_segment

NOW = datetime.now(UTC)
IDS = IdSource()


def segment(base: int, *ids: str) -> Segment:
    body = pack_segment([msgspec.json.encode(id) for id in ids], [b"1"] * len(ids))
    return Segment(base, NOW, IDS.block(1), body)


def test_offsets_are_those_inside_the_leased_span_alone() -> None:
    lease = Lease(1, 1, 11, 14, [segment(10, "a", "b"), segment(12, "c", "d", "e")])
    assert lease.offsets() == {"b": 11, "c": 12, "d": 13}
    assert lease.count == 3


def test_segments_beyond_the_leased_span_have_no_offsets_in_it() -> None:
    segments = [segment(0, "a", "b"), segment(2, "c", "d"), segment(4, "e", "f", "g")]
    assert Lease(1, 1, 2, 3, segments).offsets() == {"c": 2}


def test_a_lease_is_found_by_its_id_and_by_its_cursor() -> None:
    book = LeaseBook()
    first, second = Lease(1, 7, 0, 1, [segment(0, "a")]), Lease(1, 7, 1, 2, [segment(1, "b")])
    book.add("L1", first)
    book.add("L2", second)
    assert book.get("L1", 1) is first
    assert book.get("L1", 2) is None
    assert book.of_cursor(1, 7) is second
    assert book.of_cursor(1, 8) is None


def test_a_finished_lease_is_forgotten_and_a_newer_one_of_the_cursor_is_kept() -> None:
    book = LeaseBook()
    first, second = Lease(1, 7, 0, 1, [segment(0, "a")]), Lease(1, 7, 1, 2, [segment(1, "b")])
    book.add("L1", first)
    book.add("L2", second)
    book.finish("L1", 1)
    assert book.get("L1", 1) is None
    assert book.of_cursor(1, 7) is second
    book.finish("L2", 1)
    book.finish("L2", 1)
    assert book.of_cursor(1, 7) is None


def test_a_lease_over_several_partitions_has_one_entry_each() -> None:
    book = LeaseBook()
    book.add("L", Lease(1, 7, 0, 1, [segment(0, "a")]))
    book.add("L", Lease(2, 7, 0, 1, [segment(0, "a")]))
    book.finish("L", 1)
    assert book.get("L", 1) is None
    assert book.get("L", 2) is not None


def test_the_oldest_leases_are_forgotten_beyond_a_number_of_messages() -> None:
    book = LeaseBook()
    for number in range(400):
        book.add(f"L{number}", Lease(number, 7, 0, 1000, []))
    assert book.get("L0", 0) is None
    assert book.get("L399", 399) is not None
    assert book.of_cursor(0, 7) is None
