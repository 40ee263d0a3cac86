"""What the document says of the bodies of hot routes is what their hand-written decoders take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.errors import BadRequest
from queen.http.api.table import all_routes
from queen.http.routing.document import build_document
from queen.http.server.message import Route
from queen.wire.ack import AckBatch, SingleAck, decode_ack, decode_ack_batch
from queen.wire.push import LONGEST_NAME, PushBody, decode_push
from queen.wire.transaction import TransactionBody, decode_transaction

UUID = "019ae0f0-6f2c-7000-8000-000000000001"

Accepts = Callable[[type, Any], bool]

texts = st.one_of(
    st.sampled_from(["", " ", "a", "é b", "a\n", "\x00", "\x7f", "x" * LONGEST_NAME, "x" * (LONGEST_NAME + 1), UUID]),
    st.text(alphabet=st.characters(max_codepoint=0x2FF), max_size=5),
)
values = st.one_of(texts, st.none(), st.booleans(), st.integers(), st.just([]), st.just({}))


def sometimes(likely: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly what belongs there, sometimes anything."""
    return st.one_of(likely, likely, likely, values)


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={name: sometimes(value) for name, value in fields.items()})


names = st.one_of(st.sampled_from(["orders", "Default"]), texts)
items = objects(queue=names, partition=names, payload=values, transactionId=texts, traceId=st.sampled_from(["", UUID]))
pushes = objects(items=st.lists(sometimes(items), max_size=3), itemz=st.just([]))

good_names = st.sampled_from(["orders", "é b", "x" * LONGEST_NAME])
good_items = st.fixed_dictionaries(
    {"queue": good_names},
    optional={"partition": good_names, "payload": values, "transactionId": good_names, "traceId": st.just(UUID)},
)
good_acks = st.fixed_dictionaries(
    {"transactionId": good_names, "partitionId": st.sampled_from([UUID, "p"])},
    optional={
        "leaseId": st.one_of(st.none(), st.just(UUID)),
        "status": st.sampled_from([None, "completed", "failed"]),
        "error": st.one_of(st.none(), texts),
    },
)
good_groups = st.fixed_dictionaries({}, optional={"consumerGroup": st.one_of(st.none(), good_names)})


@pytest.fixture(scope="module")
def accepts() -> Accepts:
    """Whether the schema that the document has for a type accepts a value."""
    routes = [
        Route(one.method, one.path, one.handler, one.access, declaration=one)  # type: ignore[arg-type]
        for one in all_routes()
        if one.path in ("/api/v1/push", "/api/v1/ack", "/api/v1/ack/batch", "/api/v1/transaction")
    ]
    components = build_document(routes)["components"]
    validators: dict[type, jsonschema_rs.Validator] = {
        kind: jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{kind.__name__}", "components": components})
        for kind in (PushBody, SingleAck, AckBatch, TransactionBody)
    }
    return lambda kind, value: validators[kind].is_valid(value)


def is_decoded(decode: Callable[[bytes], Any], value: Any) -> bool:
    try:
        decode(msgspec.json.encode(value))
    except BadRequest:
        return False
    return True


@settings(max_examples=400, deadline=None)
@given(body=sometimes(pushes))
def test_a_push_is_taken_exactly_when_its_schema_says_so(accepts: Accepts, body: Any) -> None:
    assert is_decoded(decode_push, body) == accepts(PushBody, body)


@settings(max_examples=200, deadline=None)
@given(body=st.fixed_dictionaries({"items": st.lists(good_items, max_size=3)}))
def test_a_good_push_is_allowed_by_its_schema_and_taken(accepts: Accepts, body: Any) -> None:
    assert accepts(PushBody, body)
    assert len(decode_push(msgspec.json.encode(body)).items) == len(body["items"])


@settings(max_examples=200, deadline=None)
@given(ack=good_acks, group=good_groups)
def test_a_good_ack_is_allowed_by_its_schema_and_taken(accepts: Accepts, ack: Any, group: Any) -> None:
    body = ack | group
    assert accepts(SingleAck, body)
    item, named = decode_ack(msgspec.json.encode(body))
    assert (item.transaction_id, item.lease_id, named) == (
        body["transactionId"],
        body.get("leaseId"),
        body.get("consumerGroup"),
    )


@settings(max_examples=200, deadline=None)
@given(acks=st.lists(good_acks, max_size=3), group=good_groups)
def test_a_good_batch_of_acks_is_allowed_by_its_schema_and_taken(accepts: Accepts, acks: Any, group: Any) -> None:
    body = {"acknowledgments": acks} | group
    assert accepts(AckBatch, body)
    taken, _ = decode_ack_batch(msgspec.json.encode(body))
    assert [item.transaction_id for item in taken] == [ack["transactionId"] for ack in acks]


@settings(max_examples=200, deadline=None)
@given(
    operations=st.lists(
        st.one_of(
            st.lists(good_items, max_size=3).map(lambda some: {"type": "push", "items": some}),
            st.tuples(good_acks, good_groups).map(lambda two: {"type": "ack"} | two[0] | two[1]),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_a_good_transaction_is_allowed_by_its_schema_and_taken(accepts: Accepts, operations: Any) -> None:
    body = {"operations": operations}
    assert accepts(TransactionBody, body)
    taken = decode_transaction(msgspec.json.encode(body))
    assert len(taken) == sum(len(one["items"]) if one["type"] == "push" else 1 for one in operations)


@pytest.mark.parametrize(
    ("kind", "decode", "body"),
    [
        (PushBody, decode_push, {"items": [{"queue": "q", "payloads": 1}]}),
        (SingleAck, decode_ack, {"transactionId": "t", "partitionId": UUID, "lease": UUID}),
        (AckBatch, decode_ack_batch, {"acknowledgments": [{"transactionId": "t", "partitionId": UUID, "group": "g"}]}),
        (TransactionBody, decode_transaction, {"operations": [{"type": "push", "items": []}], "locks": []}),
    ],
)
def test_an_unknown_field_is_refused_by_schema_and_decoder(
    accepts: Accepts, kind: type, decode: Callable[[bytes], Any], body: Any
) -> None:
    assert not accepts(kind, body)
    with pytest.raises(BadRequest, match="unknown field"):
        decode(msgspec.json.encode(body))
