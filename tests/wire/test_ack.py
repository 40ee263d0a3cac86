"""The bodies of acknowledgments: lenient where clients are careless, clear where they are wrong."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from queen.errors import BadRequest
from queen.wire.ack import decode_ack, decode_ack_batch


def test_an_ack_is_read_as_it_is_sent() -> None:
    item, group = decode_ack(
        b'{"transactionId":"t","partitionId":"p","status":"failed","leaseId":"l","error":"e","consumerGroup":"g"}'
    )
    assert (item.transaction_id, item.partition_id, item.status) == ("t", "p", "failed")
    assert (item.lease_id, item.error, group) == ("l", "e", "g")


@pytest.mark.parametrize("absent", ["null", "5", "{}", "[]", "true"])
def test_optional_fields_that_are_no_text_count_as_absent(absent: str) -> None:
    fields = "".join(f',"{name}":{absent}' for name in ("status", "leaseId", "error", "consumerGroup"))
    item, group = decode_ack(b'{"transactionId":"t","partitionId":"p"' + fields.encode() + b"}")
    assert (item.status, item.lease_id, item.error, group) == (None, None, None, None)
    fields = "".join(f',"{name}":{absent}' for name in ("status", "leaseId", "error"))
    items, group = decode_ack_batch(
        b'{"acknowledgments":[{"transactionId":"t","partitionId":"p"'
        + fields.encode()
        + b'}],"consumerGroup":'
        + absent.encode()
        + b"}"
    )
    assert (items[0].status, items[0].lease_id, items[0].error, group) == (None, None, None, None)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "Empty request body"),
        (b"{", "Invalid JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "transactionId is required"),
        (b'{"transactionId":5,"partitionId":"p"}', "transactionId is required"),
        (b'{"transactionId":"","partitionId":"p"}', "transactionId is required"),
        (b'{"transactionId":"t"}', "partitionId is required"),
        (b'{"transactionId":"t","partitionId":null}', "partitionId is required"),
        (b'{"transactionId":"t","partitionId":""}', "partitionId is required"),
        (b'{"transactionId":"t","partitionId":"","error":5}', "partitionId is required"),
        (b'{"transactionId":"","partitionId":"p","error":5}', "transactionId is required"),
        (b'{"transactionId":"\xff","partitionId":"p"}', "Invalid JSON"),
        (b'{"transactionId":"\\ud800","partitionId":"p"}', "Invalid JSON"),
    ],
)
def test_a_bad_ack_is_refused_with_what_is_wrong(body: bytes, error: str) -> None:
    with pytest.raises(BadRequest) as refused:
        decode_ack(body)
    assert error in str(refused.value)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "Empty request body"),
        (b"nonsense", "Invalid JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "acknowledgments array is required"),
        (b'{"acknowledgments":null}', "acknowledgments array is required"),
        (b'{"acknowledgments":{}}', "acknowledgments array is required"),
        (b'{"acknowledgments":[1]}', "valid transactionId string (at acknowledgments[0])"),
        (b'{"acknowledgments":[{"partitionId":"p"}]}', "valid transactionId string (at acknowledgments[0])"),
        (
            b'{"acknowledgments":[{"transactionId":"t","partitionId":"p"},{"transactionId":"t"}]}',
            "valid partitionId string to ensure message uniqueness (at acknowledgments[1])",
        ),
        (b'{"acknowledgments":[{"transactionId":"\xff","partitionId":"p"}]}', "Invalid JSON"),
    ],
)
def test_a_bad_batch_is_refused_with_what_is_wrong_and_where(body: bytes, error: str) -> None:
    with pytest.raises(BadRequest) as refused:
        decode_ack_batch(body)
    assert error in str(refused.value)


def test_an_empty_batch_is_no_error() -> None:
    assert decode_ack_batch(b'{"acknowledgments":[]}') == ([], None)


def test_endless_nesting_is_refused() -> None:
    for decode in (decode_ack, decode_ack_batch):
        with pytest.raises(BadRequest, match="nested too deeply"):
            decode(b'{"x":' * 100_000)


@given(
    st.binary(max_size=100)
    | st.dictionaries(
        st.sampled_from(["acknowledgments", "transactionId", "partitionId", "status", "consumerGroup"]),
        st.none() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=3) | st.just([{}, 1]),
    ).map(msgspec.json.encode)
)
def test_nothing_whatever_raises_anything_but_bad_request(body: bytes) -> None:
    for decode in (decode_ack, decode_ack_batch):
        try:
            decode(body)
        except BadRequest as error:
            assert str(error)
