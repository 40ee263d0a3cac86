"""The bodies of acknowledgments."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from queen.errors import BadRequest
from queen.wire.decode import check_known, decode_fields, field_names
from queen.wire.push import NameText

_any = msgspec.json.Decoder()


Status: TypeAlias = Annotated[
    str,
    Meta(
        extra_json_schema={
            "description": "`completed` (or `success`), `failed`, `retry` or `dlq`; `completed` when absent."
        }
    ),
]
_Required: TypeAlias = Annotated[str, Meta(extra_json_schema={"minLength": 1})]


class AckItem(msgspec.Struct, forbid_unknown_fields=True):
    """What became of a message. Without `leaseId`, no lease is checked."""

    transaction_id: _Required = msgspec.field(name="transactionId")
    partition_id: _Required = msgspec.field(name="partitionId")
    lease_id: str | None = msgspec.field(default=None, name="leaseId")
    status: Status | None = None
    error: str | None = None


class SingleAck(AckItem):
    """One acknowledgment, with its group."""

    consumer_group: NameText | None = msgspec.field(default=None, name="consumerGroup")


class AckBatch(msgspec.Struct, forbid_unknown_fields=True):
    """Acknowledgments of one group, which is named here and not per item."""

    acknowledgments: list[AckItem]
    consumer_group: NameText | None = msgspec.field(default=None, name="consumerGroup")


_single = msgspec.json.Decoder(SingleAck)
_batch = msgspec.json.Decoder(AckBatch)


def decode_ack(body: bytes) -> tuple[AckItem, str | None]:
    """The acknowledgment of `POST /ack` and its group."""
    try:
        ack = _single.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = decode_fields(body, SingleAck)
        if not optional_str(value, "transactionId"):
            raise BadRequest("transactionId is required") from None
        if not optional_str(value, "partitionId"):
            raise BadRequest("partitionId is required to ensure message uniqueness") from None
        return _lenient(value), optional_str(value, "consumerGroup")
    if not ack.transaction_id:
        raise BadRequest("transactionId is required")
    if not ack.partition_id:
        raise BadRequest("partitionId is required to ensure message uniqueness")
    return ack, ack.consumer_group


def decode_ack_batch(body: bytes) -> tuple[list[AckItem], str | None]:
    """The acknowledgments of `POST /ack/batch` and their group."""
    try:
        batch = _batch.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = decode_fields(body, AckBatch)
        items = value.get("acknowledgments")
        if not isinstance(items, list):
            raise BadRequest("acknowledgments array is required") from None
        acks = []
        for index, item in enumerate(items):
            where = f"(at acknowledgments[{index}])"
            if not isinstance(item, dict) or not isinstance(item.get("transactionId"), str):
                raise BadRequest(f"Each acknowledgment must have a valid transactionId string {where}") from None
            if not isinstance(item.get("partitionId"), str):
                raise BadRequest(
                    "Each acknowledgment must have a valid partitionId string to ensure message uniqueness " + where
                ) from None
            check_known(item, field_names(AckItem), f"acknowledgments[{index}]")
            acks.append(_lenient(item))
        return acks, optional_str(value, "consumerGroup")
    return batch.acknowledgments, batch.consumer_group


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object, or `BadRequest` that says what came instead."""
    if not body:
        raise BadRequest("Empty request body")
    try:
        value = _any.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"Invalid JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("Invalid JSON: nested too deeply") from error
    if not isinstance(value, dict):
        raise BadRequest("request body must be a JSON object")
    return value


def optional_str(value: dict[str, Any], key: str) -> str | None:
    """A text field; anything else counts as absent."""
    found = value.get(key)
    return found if isinstance(found, str) else None


def _lenient(value: dict[str, Any]) -> AckItem:
    return AckItem(
        value["transactionId"],
        value["partitionId"],
        optional_str(value, "leaseId"),
        optional_str(value, "status"),
        optional_str(value, "error"),
    )
