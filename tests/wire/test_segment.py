"""The segment codec: what is packed comes back, and broken bytes are never taken for messages."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.ids import IdSource
from queen.wire.segment import MalformedSegment, Segment, pack_segment

AT = datetime(2026, 4, 26, 10, 59, 28, 267966, UTC)
BLOCK = IdSource().block(1)
TAIL = b',"partition":"p"}'

# Anything a JSON string can hold; surrogates alone are not text.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
payloads = json_values.map(msgspec.json.encode) | st.sampled_from(
    [b"null", b"{}", b"[]", b"1.0", b"-0.0", b"1e400", b"123456789012345678901234567890", b'"\\u00e9\\/"', b" 1 "]
)
messages = st.tuples(texts, payloads, st.none() | st.uuids().map(str), st.none() | texts)
batches = st.lists(messages, min_size=1, max_size=12)

Message = tuple[str, bytes, str | None, str | None]


def pack(batch: list[Message]) -> bytes:
    return pack_segment(
        [msgspec.json.encode(message[0]) for message in batch],
        [message[1] for message in batch],
        [message[2] for message in batch] if any(message[2] for message in batch) else None,
        [message[3] for message in batch] if any(message[3] for message in batch) else None,
    )


def read(body: bytes, base: int = 0) -> Segment:
    segment = Segment(base, AT, BLOCK, body)
    segment.check()
    return segment


def contents(segment: Segment) -> list[Message | None]:
    ids = segment.transaction_ids()
    return [
        None if segment.is_deleted(i) else (ids[i], segment.payload(i), segment.trace_id(i), segment.producer(i))
        for i in range(segment.count)
    ]


@given(batches)
def test_what_is_packed_comes_back(batch: list[Message]) -> None:
    segment = read(pack(batch), 1000)
    # An empty producer among others is kept; where all are empty or absent none is stored.
    expected = batch if any(message[3] for message in batch) else [(*message[:3], None) for message in batch]
    assert contents(segment) == expected
    assert (segment.count, segment.end_offset) == (len(batch), 1000 + len(batch))
    assert Segment.decode_transactions(segment.transactions_json) == [message[0] for message in batch]


@given(batches, st.data())
def test_a_message_taken_out_leaves_the_others_where_they_were(batch: list[Message], data: st.DataObject) -> None:
    segment = read(pack(batch))
    before = contents(segment)
    gone: set[int] = set()
    for index in data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=3)):
        segment = read(segment.without(index))
        gone.add(index)
        assert contents(segment) == [None if i in gone else message for i, message in enumerate(before)]


@given(batches, st.data())
def test_rendered_messages_are_the_json_the_producer_sent(batch: list[Message], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(batch)))
    last = data.draw(st.integers(first, len(batch)))
    out: list[bytes] = []
    assert read(pack(batch)).render(first, last, TAIL, out) == last - first
    for rendered, (transaction_id, payload, trace_id, _) in zip(out, batch[first:last], strict=True):
        assert b'"data":' + payload + b',"producerSub":' in rendered
        value = msgspec.json.decode(rendered, type=dict[str, msgspec.Raw])
        assert bytes(value["data"]).strip() == payload.strip()
        assert msgspec.json.decode(value["transactionId"]) == transaction_id
        assert msgspec.json.decode(value["traceId"]) == trace_id
        assert msgspec.json.decode(value["createdAt"]) == "2026-04-26T10:59:28.267966Z"
    ids = [msgspec.json.decode(rendered, type=dict[str, msgspec.Raw])["id"] for rendered in out]
    assert [msgspec.json.decode(id) for id in ids] == [BLOCK.text(i) for i in range(first, last)]


def test_a_deleted_message_is_not_rendered() -> None:
    batch: list[Message] = [("a", b"1", None, None), ("b", b"2", None, None), ("c", b"3", None, None)]
    out: list[bytes] = []
    assert read(read(pack(batch)).without(1)).render(0, 3, TAIL, out) == 2
    assert [msgspec.json.decode(rendered)["data"] for rendered in out] == [1, 3]


@settings(max_examples=40)
@given(batches)
def test_every_truncation_is_refused(batch: list[Message]) -> None:
    body = pack(batch)
    for length in range(len(body)):
        with pytest.raises(MalformedSegment):
            read(body[:length])


@given(batches, st.binary(min_size=1, max_size=8))
def test_trailing_bytes_are_refused(batch: list[Message], more: bytes) -> None:
    with pytest.raises(MalformedSegment):
        read(pack(batch) + more)


def test_an_unknown_version_is_refused_by_name() -> None:
    with pytest.raises(MalformedSegment, match="version 9"):
        read(b"\x09" + pack([("a", b"1", None, None)])[1:])


@settings(max_examples=20)
@given(batches, st.booleans())
def test_every_truncation_of_a_stored_body_is_refused(batch: list[Message], encrypt: bool) -> None:
    envelope = Envelope([bytes(range(32))])
    # Long enough to be compressed as well.
    stored = envelope.seal(pack(batch * 30), encrypt=encrypt)
    for length in {*range(min(40, len(stored))), *range(0, len(stored), 97), len(stored) - 1}:
        with pytest.raises((MalformedSegment, EnvelopeError)):
            read(envelope.open(stored[:length]))


@given(batches, st.data())
def test_a_changed_column_length_never_gives_wrong_messages(batch: list[Message], data: st.DataObject) -> None:
    """Whatever the header says, a segment is either refused or reads as what was packed."""
    body = bytearray(pack(batch))
    position = data.draw(st.integers(1, 16))
    body[position] ^= data.draw(st.integers(1, 255))
    try:
        segment = read(bytes(body))
        found = contents(segment)
    except MalformedSegment:
        return
    assert [message[1] for message in found if message] == [message[1] for message in batch]


@settings(max_examples=300)
@given(batches, st.data())
def test_flipped_bytes_anywhere_are_refused_as_malformed_or_leave_a_segment_of_as_many_messages(
    batch: list[Message], data: st.DataObject
) -> None:
    body = bytearray(pack(batch))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        segment = read(bytes(body))
        ids = segment.transaction_ids()
    except MalformedSegment:
        return
    assert segment.count == len(ids) == len(batch)
    assert segment.render(0, segment.count, TAIL, []) <= len(batch)
