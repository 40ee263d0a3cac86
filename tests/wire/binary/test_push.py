"""Binary bodies of pushes and transactions."""

from __future__ import annotations

import contextlib
import struct

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from queen.errors import BadRequest
from queen.wire.binary.push import MOST_BYTES, decode_binary_push
from queen.wire.transaction import CountedOperations, PushOperation, decode_transaction
from tests.support.frames import Group, binary_push, framed_push, framed_transaction

names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=20)
payloads = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
).map(msgspec.json.encode)
groups = st.lists(
    st.builds(Group, names, names, st.lists(st.tuples(st.one_of(st.just(""), names), payloads), max_size=5)), max_size=4
)
ONE = Group("orders", "Default", [("a", b'{"n":1}')])


def flat(sent: list[Group]) -> list[tuple[str, str, str, bytes]]:
    return [(group.queue, group.partition, id, payload) for group in sent for id, payload in group.messages]


@given(groups, st.booleans(), st.booleans())
def test_what_is_encoded_is_decoded(sent: list[Group], compress: bool, counts: bool) -> None:
    push = decode_binary_push(binary_push(sent, compress=compress, counts=counts))
    read = [(one.queue, one.partition, one.transaction_id, bytes(one.payload)) for one in push.items]
    assert (read, push.counts) == (flat(sent), counts)
    unnamed = decode_binary_push(binary_push(sent, compress=compress, named=False))
    assert [bytes(one.payload) for one in unnamed.items] == [payload for *_, payload in flat(sent)]


@given(groups)
def test_frames_are_decoded_and_have_transaction_ids(sent: list[Group]) -> None:
    items = decode_binary_push(framed_push(sent)).items
    assert [(one.queue, one.partition, bytes(one.payload)) for one in items] == [
        (queue, partition, payload) for queue, partition, _, payload in flat(sent)
    ]
    for one, (_, _, id, _) in zip(items, flat(sent), strict=True):
        assert one.transaction_id == id if id else len(one.transaction_id) == 36


@given(st.data(), groups, st.booleans())
def test_bodies_that_are_cut_or_changed_are_refused_or_read(
    data: st.DataObject, sent: list[Group], framed: bool
) -> None:
    body = framed_push(sent) if framed else binary_push(sent)

    def place() -> int:
        # Frames hold new ids each time, so that their length, once compressed, is not always the same.
        return 4 + data.draw(st.integers(0, 1 << 20)) % (len(body) - 4)

    cut = body[: place()]
    with pytest.raises(BadRequest):
        decode_binary_push(cut)
    changed = bytearray(body)
    changed[place()] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(BadRequest):
        decode_binary_push(bytes(changed))


@pytest.mark.parametrize(
    ("payloads", "at"),
    [
        ([b"1", b"{"], 1),
        ([b'"a', b'b"'], 0),
        ([b"1,2", b'"', b'"'], 0),
        ([b""], 0),
        ([b"1", b"nul"], 1),
        ([b"[", b"]"], 0),
    ],
)
def test_each_payload_is_one_json_document(payloads: list[bytes], at: int) -> None:
    for encode in (binary_push, framed_push):
        with pytest.raises(BadRequest, match=rf"not one JSON document.*items\[{at}\]"):
            decode_binary_push(encode([Group("q", "p", [("", payload) for payload in payloads])]))


def test_space_around_a_payload_is_allowed() -> None:
    (item,) = decode_binary_push(binary_push([Group("q", "p", [("", b" 1 ")])])).items
    assert bytes(item.payload).strip() == b"1"


def bomb() -> bytes:
    packed = zstandard.compress(bytes(MOST_BYTES + 1), 1)
    return b"QPB1\x01" + struct.pack("<I", MOST_BYTES + 1) + packed


BAD_BODIES = [
    (b"QPB1", "ends early"),
    (b"QPB1\x20\0\0\0\0", "unknown flags 32"),
    (b"QPB1\x09\0\0\0\0", "exclude each other"),
    (b"QPB1\0\0\0\0\0!", "1 bytes too many"),
    (b"QPB1\x01\0\0\0\0junk", "Invalid binary push"),
    (bomb(), "at most"),
    (binary_push([Group("q", "p", [("", b'"%b"' % bytes(9 << 20))])], compress=True), "at most 8388608 are taken"),
    (framed_push([Group("q", "p", [("", b'"%b"' % bytes(9 << 20))])]), "at most 8388608 are taken"),
    (b"QPB1\0\1\0\0\0\1\0q\1\0p\xff\xff\xff\xff", "more than 100000 messages"),
    (b"QPB1\x01\x05\0\0\0" + zstandard.compress(b"\0\0\0\0"), "unpacks to 4 bytes, not 5"),
    (binary_push([Group("", "p", [("", b"1")])]), "Queue must not be empty"),
    (binary_push([Group("q", "p" * 256, [("", b"1")])]), "Partition must be at most 255 characters"),
    (binary_push([Group("q", "p", [("t" * 256, b"1")])]), "TransactionId must be at most 255 characters"),
    (binary_push([Group("q", "p", [("", b'"\xff"')])]), "not UTF-8"),
]


@pytest.mark.parametrize(("body", "message"), BAD_BODIES, ids=[message for _, message in BAD_BODIES])
def test_bad_bodies_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        decode_binary_push(body)


def test_a_transaction_has_its_head_first_then_pushes_then_riders() -> None:
    head = msgspec.json.encode(
        {
            "operations": [{"type": "ack", "transactionId": "t", "partitionId": "7"}],
            "kv": [{"op": "put", "ns": "n", "key": "k", "value": 1, "forever": True}],
        }
    )
    read = decode_transaction(framed_transaction(head, [ONE]))
    assert [type(one).__name__ for one in read] == ["AckOperation", "PushOperation", "KvRider"]
    assert not isinstance(read, CountedOperations)
    alone = decode_transaction(framed_transaction(b"", [ONE], counts=True))
    assert isinstance(alone, CountedOperations) and isinstance(alone[0], PushOperation)
    assert len(decode_transaction(framed_transaction(b'{"operations": []}', [ONE]))) == 1


BAD_TRANSACTIONS = [
    (framed_transaction(b"{", [ONE]), "Invalid JSON"),
    (framed_transaction(b"", []), "operations array cannot be empty"),
    (b"QTB1\x08\0\0\0\0\0\0\0\0", "unknown flags 8"),
    (b"QTB1\0\xff\0\0\0", "ends early"),
]


@pytest.mark.parametrize(("body", "message"), BAD_TRANSACTIONS, ids=[message for _, message in BAD_TRANSACTIONS])
def test_bad_transactions_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        decode_transaction(body)
