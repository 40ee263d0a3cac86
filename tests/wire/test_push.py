"""The body of a push: payloads untouched, and every refusal says what is wrong and where."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from queen.errors import BadRequest
from queen.wire.push import check_name, decode_push


@pytest.mark.parametrize(
    "payload",
    [
        b"null",
        b"{}",
        b"[]",
        b"true",
        b"0",
        b"-0.0",
        b"1.0",
        b"1e400",
        b"1E+2",
        b"123456789012345678901234567890",
        b'""',
        b'"\\u00e9\\/\\ud83d\\ude00"',
        '"é\U0001f600"'.encode(),
        b'{"a":1,"a":2}',
        b'{"b" : 1 , "a":[ 1,2 ]}',
        b'{"encrypted":"x","iv":"y","authTag":"z"}',
        b"[" * 500 + b"]" * 500,
        b'{"a":' * 300 + b"1" + b"}" * 300,
    ],
    ids=repr,
)
def test_a_payload_is_kept_byte_for_byte(payload: bytes) -> None:
    (item,) = decode_push(b'{"items":[{"queue":"q","payload":' + payload + b"}]}").items
    assert bytes(item.payload) == payload


def test_what_is_left_out_has_its_default() -> None:
    (item,) = decode_push(b'{"items":[{"queue":"q"}],"bufferMs":"whatever"}').items
    assert (item.queue, item.partition, item.transaction_id, item.trace_id) == ("q", "Default", "", "")
    assert bytes(item.payload) == b"null"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "Empty request body"),
        (b"{", "Invalid JSON"),
        (b"nonsense", "Invalid JSON"),
        (b'{"items":[]', "Invalid JSON"),
        (b'{"items":[{"queue":"q","payload":NaN}]}', "Invalid JSON"),
        (b'{"items":[{"queue":"q","payload":[1,]}]}', "Invalid JSON"),
        (b'{"items":[{"queue":"q","payload":01}]}', "Invalid JSON"),
        (b'{"items":[{"queue":"q","payload":"\xff"}]}', "not UTF-8 at byte 34"),
        (b'{"items":[{"queue":"q\xc3","payload":1}]}', "not UTF-8 at byte 21"),
        (b"[]", "items array is required"),
        (b"null", "items array is required"),
        (b'"items"', "items array is required"),
        (b"{}", "items array is required"),
        (b'{"items":null}', "items array is required"),
        (b'{"items":{}}', "items array is required"),
        (b'{"items":[1]}', "items[0]"),
        (b'{"items":[null]}', "items[0]"),
        (b'{"items":[{}]}', "Queue must be a string (at items[0].queue)"),
        (b'{"items":[{"queue":"q"},{"queue":7}]}', "Queue must be a string (at items[1].queue)"),
        (b'{"items":[{"queue":null}]}', "Queue must be a string (at items[0].queue)"),
        (b'{"items":[{"queue":""}]}', "Queue must not be empty (at items[0].queue)"),
        (b'{"items":[{"queue":"q","partition":null}]}', "Partition must be a string (at items[0].partition)"),
        (b'{"items":[{"queue":"q","partition":""}]}', "Partition must not be empty (at items[0].partition)"),
        (b'{"items":[{"queue":"q","partition":"a\\u0000"}]}', "control characters (at items[0].partition)"),
        (b'{"items":[{"queue":"a\\nb"}]}', "control characters (at items[0].queue)"),
        (b'{"items":[{"queue":"q","transactionId":5}]}', "TransactionId must be a string (at items[0].transactionId)"),
        (b'{"items":[{"queue":"q","traceId":5}]}', "TraceId must be a string (at items[0].traceId)"),
        (b'{"items":[{"queue":"q","traceId":"5"}]}', "TraceId must be a UUID (at items[0].traceId)"),
    ],
)
def test_a_bad_body_is_refused_with_what_and_where(body: bytes, error: str) -> None:
    with pytest.raises(BadRequest) as refused:
        decode_push(body)
    assert error in str(refused.value)


@pytest.mark.parametrize("field", ["queue", "partition", "transactionId"])
def test_names_may_have_255_characters_and_no_more(field: str) -> None:
    def body(length: int) -> bytes:
        return msgspec.json.encode({"items": [{"queue": "q"} | {field: "é" * length}]})

    assert len(decode_push(body(255)).items) == 1
    with pytest.raises(BadRequest, match=f"at most 255 characters.*items\\[0\\].{field}"):
        decode_push(body(256))


@pytest.mark.parametrize("text", [b"\\ud800", b"\\udc00", b"\\ud800\\u0041", b"\\ud800x"])
@pytest.mark.parametrize("field", [b"queue", b"partition", b"transactionId", b"traceId", b"payload"])
def test_half_a_surrogate_pair_is_not_text(field: bytes, text: bytes) -> None:
    with pytest.raises(BadRequest):
        decode_push(b'{"items":[{"queue":"q","' + field + b'":"' + text + b'"}]}')


@pytest.fixture
def roomy_stack() -> Iterator[None]:
    """The depth that a worker process allows."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("field", [b"payload", b"queue", b"ignored"])
def test_endless_nesting_is_refused(roomy_stack: None, field: bytes, opening: bytes) -> None:
    with pytest.raises(BadRequest, match="nested too deeply"):
        decode_push(b'{"items":[{"queue":"q","' + field + b'":' + opening * 100_000)


@given(st.text(st.characters(categories=["L", "M", "N", "P", "S"]), min_size=1, max_size=255))
def test_anything_printable_makes_a_name(name: str) -> None:
    check_name(name, "Queue", "here")


@given(st.binary(max_size=200))
def test_no_bytes_whatever_raise_anything_but_bad_request(body: bytes) -> None:
    try:
        decode_push(body)
    except BadRequest as error:
        assert str(error)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["items", "queue", "partition", "payload", "transactionId", "traceId"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=10,
    )
)
def test_no_json_whatever_raises_anything_but_bad_request(value: object) -> None:
    try:
        body = msgspec.json.encode({"items": value})
    except UnicodeEncodeError:
        return
    try:
        decode_push(body)
    except BadRequest as error:
        assert str(error)
