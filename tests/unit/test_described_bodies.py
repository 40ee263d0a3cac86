"""What the document says of the bodies that are decoded by hand is what the decoders take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.errors import BadRequest
from queen.http.openapi.document import build_document
from queen.http.operations import TAGS, all_operations
from queen.http.operations.messaging import (
    AcknowledgmentBatch,
    PushRequest,
    PushRequestItem,
    SingleAcknowledgment,
    TransactionRequest,
)
from queen.http.server.message import Response
from queen.http.server.router import Access, Router
from queen.wire.ack import decode_ack, decode_ack_batch
from queen.wire.push import LONGEST_NAME, PushItem, decode_push
from queen.wire.transaction import decode_transaction

UUID = "019ae0f0-6f2c-7000-8000-000000000001"

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
ids = st.one_of(st.just(UUID), texts)
acks = objects(transactionId=texts, partitionId=ids, leaseId=ids, status=texts, error=texts, consumerGroup=names)
pushes = objects(items=st.lists(sometimes(items), max_size=3))
batches = objects(acknowledgments=st.lists(sometimes(acks), max_size=3), consumerGroup=names)


@pytest.fixture(scope="module")
def accepts() -> Callable[[type, Any], bool]:
    """Whether the schema that the document has for a type accepts a value."""
    router = Router()
    for key in ("POST /api/v1/push", "POST /api/v1/ack", "POST /api/v1/ack/batch", "POST /api/v1/transaction"):
        method, pattern = key.split()
        router.add(method, pattern, lambda request: Response(204), Access.PUBLIC)
    components = build_document(router.routes, all_operations(), TAGS)["components"]
    validators: dict[type, jsonschema_rs.Validator] = {
        kind: jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{kind.__name__}", "components": components})
        for kind in (PushRequest, SingleAcknowledgment, AcknowledgmentBatch, TransactionRequest)
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
def test_a_push_is_taken_exactly_when_its_schema_says_so(accepts: Callable[[type, Any], bool], body: Any) -> None:
    assert is_decoded(decode_push, body) == accepts(PushRequest, body)


@settings(max_examples=300, deadline=None)
@given(body=acks)
def test_an_ack_that_its_schema_allows_is_taken(accepts: Callable[[type, Any], bool], body: Any) -> None:
    # Optional fields of the wrong type count as absent, so more is taken than the schema allows.
    if accepts(SingleAcknowledgment, body):
        item, _ = decode_ack(msgspec.json.encode(body))
        assert item.transaction_id == body["transactionId"]


@settings(max_examples=300, deadline=None)
@given(body=batches)
def test_a_batch_of_acks_that_its_schema_allows_is_taken(accepts: Callable[[type, Any], bool], body: Any) -> None:
    if accepts(AcknowledgmentBatch, body):
        items, _ = decode_ack_batch(msgspec.json.encode(body))
        assert len(items) == len(body["acknowledgments"])


@settings(max_examples=300, deadline=None)
@given(
    body=objects(
        operations=st.lists(
            st.one_of(
                pushes.map(lambda body: {"type": "push"} | body if isinstance(body, dict) else body),
                acks.map(lambda body: {"type": "ack"} | body),
            ),
            max_size=3,
        )
    )
)
def test_a_transaction_that_its_schema_allows_is_taken(accepts: Callable[[type, Any], bool], body: Any) -> None:
    if accepts(TransactionRequest, body):
        decode_transaction(msgspec.json.encode(body))


def test_the_described_item_of_a_push_is_the_one_that_is_decoded() -> None:
    def shape(kind: type[msgspec.Struct]) -> dict[str, Any]:
        return {field.encode_name: field.default for field in msgspec.structs.fields(kind) if field.name != "payload"}

    assert shape(PushRequestItem) == shape(PushItem)
