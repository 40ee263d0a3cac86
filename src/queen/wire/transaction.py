"""The body of a transaction: operations in order, each push item one of its own, payloads left as they came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from queen.errors import BadRequest
from queen.wire.ack import decode_object
from queen.wire.push import NULL, LooseItem, PushItem, check_name, check_utf8, read_items
from queen.wire.topics import EnqueueItem, ItemRef, decode_enqueue_items, decode_item_ref

_EMPTY = msgspec.Raw(b"{}")


@dataclass(frozen=True, slots=True)
class PushOperation:
    item: PushItem


@dataclass(frozen=True, slots=True)
class AckOperation:
    transaction_id: str
    partition_id: str
    status: str = "completed"
    group: str | None = None
    lease_id: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class EnqueueOperation:
    item: EnqueueItem


@dataclass(frozen=True, slots=True)
class AckItemOperation:
    ref: ItemRef


@dataclass(frozen=True, slots=True)
class UnknownOperation:
    type: str


Operation: TypeAlias = PushOperation | AckOperation | EnqueueOperation | AckItemOperation | UnknownOperation


class _Item(LooseItem):
    """An item of a push; unlike elsewhere, without a payload it carries `{}`."""

    payload: msgspec.Raw = _EMPTY


class _Operation(msgspec.Struct):
    type: Any = None
    items: msgspec.Raw = NULL
    transaction_id: Any = msgspec.field(default=None, name="transactionId")
    partition_id: Any = msgspec.field(default=None, name="partitionId")
    status: Any = None
    group: Any = msgspec.field(default=None, name="consumerGroup")
    lease_id: Any = msgspec.field(default=None, name="leaseId")
    error: Any = None
    id: Any = None
    namespace: Any = None
    topic: Any = None
    lease_owner: Any = None


class _Body(msgspec.Struct):
    operations: list[_Operation]


_body = msgspec.json.Decoder(_Body)
_items = msgspec.json.Decoder(list[_Item])


def decode_transaction(body: bytes) -> list[Operation]:
    """The operations (at least one) of a transaction. Raises `BadRequest` that says which is wrong, and how."""
    check_utf8(body)
    try:
        operations = _body.decode(body).operations
    except (msgspec.DecodeError, RecursionError) as error:
        raise _explain(body, error) from error
    if not operations:
        raise BadRequest("operations array cannot be empty")
    read: list[Operation] = []
    for index, operation in enumerate(operations):
        where = f"operations[{index}]"
        if operation.type == "push":
            read += [PushOperation(item) for item in read_items(_push_items(operation, where, body), f"{where}.items")]
        elif operation.type == "ack":
            read.append(_ack(operation, where))
        elif operation.type == "enqueue":
            read += map(EnqueueOperation, decode_enqueue_items(operation.items, f"{where}.items"))
        elif operation.type == "ackItem":
            ref = {key: getattr(operation, key) for key in ("id", "namespace", "topic", "lease_owner")}
            read.append(AckItemOperation(decode_item_ref(ref, where)))
        else:
            read.append(UnknownOperation(str(operation.type)))
    return read


def _push_items(operation: _Operation, where: str, body: bytes) -> list[_Item]:
    if operation.items == NULL:
        raise BadRequest(f"items array is required (at {where}.items)")
    try:
        return _items.decode(operation.items)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _explain(body, error) from error


def _ack(operation: _Operation, where: str) -> AckOperation:
    for value, key in ((operation.transaction_id, "transactionId"), (operation.partition_id, "partitionId")):
        if not isinstance(value, str) or not value:
            raise BadRequest(f"{key} is required (at {where}.{key})")
    group = _text(operation.group) or None
    if group is not None:
        check_name(group, "ConsumerGroup", f"{where}.consumerGroup")
    return AckOperation(
        operation.transaction_id,
        operation.partition_id,
        _text(operation.status) or "completed",
        group,
        _text(operation.lease_id),
        _text(operation.error),
    )


def _text(value: object) -> str:
    """An optional field; what is not text counts as absent."""
    return value if isinstance(value, str) else ""


def _explain(body: bytes, error: Exception) -> BadRequest:
    """Find what the decoder refused."""
    operations = decode_object(body).get("operations")
    if not isinstance(operations, list):
        return BadRequest("operations array required")
    for index, operation in enumerate(operations):
        where = f"operations[{index}]"
        if not isinstance(operation, dict):
            return BadRequest(f"Each operation must be an object (at {where})")
        items = operation.get("items")
        if items is None:
            continue
        if not isinstance(items, list):
            return BadRequest(f"items array is required (at {where}.items)")
        for position, item in enumerate(items):
            if not isinstance(item, dict):
                return BadRequest(f"Each item must be an object (at {where}.items[{position}])")
    return BadRequest(f"Invalid request: {error}")
