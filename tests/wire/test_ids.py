"""Identifiers: unique, ordered, and honest about what they name."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queen.wire.ids import IdBlock, IdSource, is_uuid, parse_lease, parse_partition_uuid, partition_uuid

partition_ids = st.integers(0, (1 << 63) - 1)


def test_ids_of_one_source_are_uuid7_and_never_go_backwards() -> None:
    source = IdSource()
    blocks = [source.block(3).text(0) for _ in range(20_000)]
    assert len(set(blocks)) == len(blocks)
    # Time and sequence are the first 18 characters; what follows is random.
    assert [text[:18] for text in blocks] == sorted(text[:18] for text in blocks)
    assert {uuid.UUID(text).version for text in blocks} == {7}
    assert {uuid.UUID(text).variant for text in blocks} == {uuid.RFC_4122}


def test_ids_inside_a_block_follow_each_other() -> None:
    block = IdSource().block(1_000_001)
    ids = [uuid.UUID(block.text(index)).int for index in (0, 1, 2, 1023, 1_000_000)]
    assert [id - ids[0] for id in ids] == [0, 1, 2, 1023, 1_000_000]


def test_blocks_do_not_overlap() -> None:
    source = IdSource()
    blocks = [(source.block(count), count) for count in (1, 100, 7) * 1000]
    ids = [block.text(index) for block, count in blocks for index in range(count)]
    assert len(set(ids)) == len(ids)


@given(st.integers(0, 100_000))
def test_a_block_is_read_back_from_what_is_stored(index: int) -> None:
    block = IdSource().block(index + 1)
    again = IdBlock.parse(block.pack())
    assert again.text(index) == block.text(index)


@given(partition_ids)
def test_a_partition_id_names_its_row(partition_id: int) -> None:
    text = partition_uuid(partition_id)
    assert is_uuid(text)
    assert parse_partition_uuid(text) == partition_id


@given(st.text(max_size=40) | st.uuids().map(str))
def test_text_that_is_no_partition_id_is_recognised(text: str) -> None:
    found = parse_partition_uuid(text)
    assert found is None or partition_uuid(found) == text.lower() or found == int(text)


@given(st.integers(0, 10**18 - 1))
def test_a_partition_may_be_named_by_its_number(partition_id: int) -> None:
    assert parse_partition_uuid(str(partition_id)) == partition_id


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1_0", "1.0", "\u0661", "\u00b2", "1" * 19])
def test_what_only_looks_like_a_number_names_no_partition(text: str) -> None:
    assert parse_partition_uuid(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "51756565-0000-8000--000-000000000001",
        "51756565-0000-8000-8_00-000000000001",
        "51756565-+000-8000-8000-000000000001",
        "51756565- 000-8000-8000-000000000001",
        "51756565-0000-8000-8000-00000000000 ",
        "51756565-0000-8000-0000-000000000001",
        "51756565-0003-8000-8000-000000000001",
    ],
)
def test_what_only_looks_like_a_partition_id_is_none(text: str) -> None:
    assert parse_partition_uuid(text) is None


@given(st.integers(0, (1 << 41) - 1), st.booleans())
def test_a_lease_id_names_its_partition_and_whether_it_holds_several(partition_id: int, several: bool) -> None:
    text = IdSource().lease(partition_id, several=several)
    assert is_uuid(text)
    assert uuid.UUID(text).version == 7
    assert parse_lease(text) == (partition_id, several)


@pytest.mark.parametrize("text", ["", "x" * 36, "019dd000-0000-4000-8000-000000000001", "not-a-lease"])
def test_text_that_is_no_lease_id_is_recognised(text: str) -> None:
    assert parse_lease(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("019dd000-0000-7000-8000-000000000001", True),
        ("019DD000-0000-7000-8000-00000000000A", True),
        ("019dd0000000700080000000000000000001", False),
        ("{19dd000-0000-7000-8000-00000000000}", False),
        ("019dd000-0000-7000-8000-00000000000", False),
        ("019dd000-0000-7000-8000-00000000000_", False),
    ],
)
def test_a_uuid_is_known_by_its_canonical_form(text: str, expected: bool) -> None:
    assert is_uuid(text) is expected
