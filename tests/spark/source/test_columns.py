"""Segments become Arrow columns that say what the segments say."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from queen.errors import BadRequest, SettingsError
from queen.spark.payloads import PayloadParser, check_payload_schema, raise_broken
from queen.spark.schemas import MESSAGES
from queen.spark.source.columns import BYTES_PER_BATCH, record_batches
from queen.spark.source.logs import SegmentRun, Span
from queen.spark.source.planning import share_out
from queen.wire.envelope import Envelope, NoEncryptionKey
from queen.wire.ids import IdBlock
from queen.wire.segment import Frame, MalformedSegment, Segment, pack_segment

_encode = msgspec.json.encode
TIME = datetime(2026, 1, 1, 12, 30, 15, 123456, UTC)
MICROS = int(TIME.timestamp()) * 1_000_000 + TIME.microsecond

messages = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), max_size=3)),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@given(
    st.lists(st.tuples(messages, st.booleans(), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(1, 4),
)
def test_columns_are_what_the_segments_hold(
    segments: list[tuple[list[tuple[str, str | None, str, bool]], bool, bool]], start: int, end: int, run: int
) -> None:
    envelope = Envelope([b"k" * 32])
    stored, expected, base = [], [], 0
    span = Span("orders", "eu", 0, 1, start, max(start, end))
    for number, (some, traced, encrypted) in enumerate(segments):
        block = IdBlock(b"01a1dfe8-13c3-7000-bc1f-", 0xFFFF_FFFF + number * 1000)
        traces = [trace for _, trace, _, _ in some] if traced else None
        body = pack_segment([_encode(one[0]) for one in some], [_encode(one[2]) for one in some], traces)
        for index, one in enumerate(some):
            if one[3]:
                body = Segment(base, TIME, block, body).without(index)
        stored.append(Frame(base, len(some), MICROS, block.pack(), envelope.seal(body, encrypt=encrypted)))
        expected += [
            {
                "queue": "orders",
                "partition": "eu",
                "offset": base + index,
                "message_id": block.text(index),
                "transaction_id": transaction,
                "trace_id": trace if traced else None,
                "created_at": TIME,
                "producer_sub": None,
                "payload": _encode(payload).decode(),
            }
            for index, (transaction, trace, payload, deleted) in enumerate(some)
            if not deleted and span.start <= base + index < span.end
        ]
        base += len(some)
    runs = (SegmentRun.of(0, stored[first : first + run]) for first in range(0, len(stored), run))
    found = [
        row for batch in record_batches(runs, [span], MESSAGES.fieldNames(), envelope) for row in batch.to_pylist()
    ]
    assert found == expected


def test_segments_of_several_partitions_share_a_batch() -> None:
    spans = [Span("orders", name, 0, number, 0, 2) for number, name in enumerate(("eu", "us"))]
    body = Envelope().seal(pack_segment([b'"a"', b'"b"'], [b"1", b"2"]))
    stored = [SegmentRun.of(slot, [Frame(0, 2, MICROS, bytes(16), body)]) for slot in (0, 1)]
    (batch,) = record_batches(iter(stored), spans, ["partition", "payload"], Envelope())
    assert batch["partition"].to_pylist() == ["eu", "eu", "us", "us"]
    assert batch["payload"].to_pylist() == ["1", "2", "1", "2"]


def test_batches_are_small_however_well_their_segments_were_compressed() -> None:
    payload = b'"%b"' % (b"x" * 3_000_000)
    body = Envelope().seal(pack_segment([b'"a"'], [payload]))
    assert len(body) < 1000
    runs = [SegmentRun.of(0, [Frame(base + n, 1, MICROS, bytes(16), body) for n in range(8)]) for base in (0, 8)]
    batches = list(record_batches(iter(runs), [Span("orders", "eu", 0, 1, 0, 16)], ["offset", "payload"], Envelope()))
    assert [offset for batch in batches for offset in batch["offset"].to_pylist()] == list(range(16))
    assert max(batch.nbytes for batch in batches) < 2 * BYTES_PER_BATCH + len(payload)
    assert all(one == payload.decode() for batch in batches for one in batch["payload"].to_pylist())


@pytest.mark.parametrize("cut", [1, 10, 25, -1])
def test_a_broken_segment_is_named(cut: int) -> None:
    body = Envelope().seal(pack_segment([b'"a"', b'"b"'], [b"1", b"2"])[:cut])
    whole = Envelope().seal(pack_segment([b'"a"'], [b"1"]))
    stored = [
        SegmentRun.of(0, [Frame(6, 1, MICROS, bytes(16), whole), Frame(7, 2, MICROS, bytes(16), body)]),
    ]
    with pytest.raises(MalformedSegment, match="offset 7 of orders/eu"):
        list(record_batches(iter(stored), [Span("orders", "eu", 0, 1, 6, 9)], MESSAGES.fieldNames(), Envelope()))


def test_an_encrypted_segment_without_its_key_is_named() -> None:
    body = Envelope([b"k" * 32]).seal(pack_segment([b'"a"'], [b"1"]), encrypt=True)
    stored = [SegmentRun.of(0, [Frame(7, 1, MICROS, bytes(16), body)])]
    with pytest.raises(NoEncryptionKey, match="offset 7 of orders/eu"):
        list(record_batches(iter(stored), [Span("orders", "eu", 0, 1, 7, 8)], ["payload"], Envelope()))


FIELDS = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("lines", pa.list_(pa.struct([("price", pa.decimal128(10, 2))]))),
    ]
)
FITTING = '{"id": 1, "name": "a\\u00e9", "at": "2026-01-01T12:30:15.123456Z", "day": "2026-01-01", "more": {"x": [1]}}'


def parse(*payloads: str) -> tuple[list[dict[str, Any]], list[int], list[str]]:
    broken: list[tuple[int, str]] = []
    table, unfit = PayloadParser(FIELDS).parse(pa.array(payloads), lambda index, why: broken.append((index, why)))
    assert sorted(index for index, _ in broken) == list(np.flatnonzero(unfit))
    return table.to_pylist(), [int(index) for index in np.flatnonzero(unfit)], [why for _, why in broken]


def test_payloads_become_fields() -> None:
    rows, unfit, _ = parse(FITTING, '{"lines": [{"price": 1.50}]}', "{}", '{"id":\n 2}')
    assert unfit == []
    assert rows[0]["id"] == 1
    assert (rows[0]["name"], rows[0]["at"], rows[0]["day"]) == ("aé", TIME, TIME.date())
    assert str(rows[1]["lines"][0]["price"]) == "1.50"
    assert set(rows[2].values()) == {None}
    assert rows[3]["id"] == 2


def test_payloads_that_do_not_fit_are_found_among_those_that_do() -> None:
    payloads = [f'{{"id": {number}}}' for number in range(50)]
    bad = {3: '{"id": "three"}', 17: "null", 18: "[1]", 30: '{"id": 1.5}', 31: '{"day": "soon"}', 49: '"text"'}
    for place, payload in bad.items():
        payloads[place] = payload
    rows, unfit, why = parse(*payloads)
    assert unfit == sorted(bad)
    assert [row["id"] for row in rows] == [None if n in bad else n for n in range(50)]
    assert any("Column(/id) changed from number to string" in text for text in why)
    assert any("not a JSON object" in text for text in why)


@pytest.mark.parametrize(
    ("precision", "scale", "payload"),
    [(5, 2, "1234.5"), (38, 18, "123456789012345678901"), (38, 18, "9" * 38), (38, 38, "1"), (5, 2, "1e40")],
)
def test_a_decimal_that_does_not_fit_is_found(precision: int, scale: int, payload: str) -> None:
    parser = PayloadParser(pa.schema([("x", pa.decimal128(precision, scale))]))
    fields, unfit = parser.parse(pa.array([f'{{"x": {payload}}}', '{"x": 0.5}']), lambda index, why: None)
    assert unfit.tolist() == [True, False]
    assert fields["x"].to_pylist() == [None, Decimal("0.5")]


def test_times_finer_than_a_microsecond_are_cut_beside_those_of_any_year() -> None:
    stamps = pa.timestamp("us", "UTC")
    parser = PayloadParser(pa.schema([("x", stamps), ("y", pa.struct([("z", pa.list_(stamps))])), ("id", pa.int64())]))
    payloads = [
        '{"x": "2026-01-01T12:30:15.123456789Z"}',
        '{"x": "0001-01-01T00:00:00Z"}',
        '{"y": {"z": ["2026-01-01T14:30:15.1234569+02:00", null]}}',
        '{"x": "9999-12-31T23:59:59.999999Z"}',
        '{"x": "soon"}',
    ]
    for _ in range(2):
        fields, unfit = parser.parse(pa.array(payloads), lambda index, why: None)
        assert unfit.tolist() == [False] * 4 + [True]
        first, last = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)
        assert fields["x"].to_pylist() == [TIME, first, None, last, None]
        assert fields["y"].to_pylist()[2] == {"z": [TIME, None]}
    # All of one kind are parsed at once.
    many, unfit = parser.parse(pa.array(payloads[:1] * 1000), raise_if_broken)
    assert many["x"].to_pylist() == [TIME] * 1000


def test_whatever_is_to_be_text_becomes_text() -> None:
    parser = PayloadParser(pa.schema([("x", pa.string()), ("y", pa.struct([("z", pa.list_(pa.string()))]))]))
    payloads = ['{"x": {"a": [1, true]}}', ' {"x": 1.5, "y": {"z": [1, "b", null]}}', "", '{"x": "\u00e9"}']
    fields, unfit = parser.parse(pa.array(payloads), lambda index, why: None)
    assert unfit.tolist() == [False, False, True, False]
    assert fields["x"].to_pylist() == ['{"a":[1,true]}', "1.5", None, "\u00e9"]
    assert fields["y"].to_pylist() == [None, {"z": ["1", "b", None]}, None, None]
    # As it was written: no digit is lost.
    exact = ['{"x": 0.10, "y": {"z": [12345678901234567890.50, 1E400]}}', '{"x": {"a": [ -0.0 , "b  c\\u00e9" ]}}']
    fields, unfit = parser.parse(pa.array(exact), raise_if_broken)
    assert fields["x"].to_pylist() == ["0.10", '{"a":[-0.0,"b  c\\u00e9"]}']
    assert fields["y"].to_pylist()[0] == {"z": ["12345678901234567890.50", "1E400"]}


def test_without_fields_every_payload_fits() -> None:
    table, unfit = PayloadParser(pa.schema([])).parse(pa.array(["null", "{}"]), raise_if_broken)
    assert (table.num_columns, list(unfit)) == (0, [False, False])


def raise_if_broken(index: int, why: str) -> None:
    raise AssertionError(f"{index}: {why}")


def test_a_broken_payload_is_named() -> None:
    with pytest.raises(BadRequest, match="offset 3 of orders/eu does not fit the schema: it is cut"):
        raise_broken("offset 3 of orders/eu", "it is cut")


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (pa.field("tags", pa.map_(pa.string(), pa.int64())), "tags as map"),
        (pa.field("a", pa.struct([("b", pa.list_(pa.duration("us")))])), r"a.b\[\] as duration"),
        (pa.field("id", pa.int64(), nullable=False), "id is NOT NULL"),
    ],
)
def test_a_schema_that_payloads_are_not_parsed_into_is_refused(field: pa.Field, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        check_payload_schema(pa.schema([field]))


@given(st.lists(st.integers(0, 100_000), max_size=20), st.integers(1, 8))
def test_tasks_share_all_of_the_spans_evenly(counts: list[int], most: int) -> None:
    spans = [Span("q", str(number), 0, number, 5, 5 + count) for number, count in enumerate(counts)]
    tasks = share_out(spans, most)
    assert len(tasks) <= most
    sizes = [sum(span.count for span in task.spans) for task in tasks]
    assert sum(sizes) == sum(counts)
    assert len({*sizes[:-1]}) <= 1
    assert all(span.count > 0 for task in tasks for span in task.spans)
    for number, count in enumerate(counts):
        pieces = [span for task in tasks for span in task.spans if span.id == number]
        assert sum(piece.count for piece in pieces) == count
        assert all(one.end == other.start for one, other in pairwise(pieces))
