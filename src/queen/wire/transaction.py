"""The body of a transaction: operations in order, each push item one of its own, payloads left as they came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from queen.errors import BadRequest
from queen.wire.ack import decode_object
from queen.wire.binary.push import TRANSACTION_MAGIC, decode_binary_transaction
from queen.wire.decode import field_names, unknown
from queen.wire.push import NULL, LooseItem, NameText, PushItem, check_items, check_name, check_utf8, read_items
from queen.wire.state.kv import KvOperation, decode_riders
from queen.wire.state.timers import TimerOperation, decode_timer_riders
from queen.wire.topics.requests import (
    EnqueueItem,
    ItemRef,
    check_enqueue,
    check_ref,
    decode_enqueue_items,
    decode_item_ref,
)

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
class KvRider:
    operation: KvOperation


@dataclass(frozen=True, slots=True)
class TimerRider:
    operation: TimerOperation


@dataclass(frozen=True, slots=True)
class UnknownOperation:
    type: str


Operation: TypeAlias = (
    PushOperation | AckOperation | EnqueueOperation | AckItemOperation | KvRider | TimerRider | UnknownOperation
)


class TransactionItem(PushItem):
    """A message to store; unlike elsewhere, without a payload it carries `{}`."""

    payload: msgspec.Raw = msgspec.field(default_factory=lambda: _EMPTY)


class PushStep(msgspec.Struct, tag_field="type", tag="push", forbid_unknown_fields=True):
    """Store messages."""

    items: list[TransactionItem]


class AckStep(msgspec.Struct, tag_field="type", tag="ack", forbid_unknown_fields=True, rename="camel"):
    """Acknowledge a message. `failed` makes it a dead letter at once."""

    transaction_id: NameText
    partition_id: NameText
    status: Annotated[str, Meta(extra_json_schema={"enum": ["completed", "success", "failed", "dlq"]})] | None = None
    consumer_group: NameText | None = None
    lease_id: str | None = None
    error: str | None = None


class EnqueueStep(msgspec.Struct, tag_field="type", tag="enqueue", forbid_unknown_fields=True):
    """Enqueue items to topics; a duplicate of an `idempotency_key` is answered with the id of the first."""

    items: Annotated[list[EnqueueItem], Meta(extra_json_schema={"minItems": 1})]


class AckItemStep(ItemRef, tag_field="type", tag="ackItem"):
    """Acknowledge an item of a topic."""


Step: TypeAlias = PushStep | AckStep | EnqueueStep | AckItemStep


class TransactionBody(msgspec.Struct, forbid_unknown_fields=True):
    """Operations that all happen, or none does. `requiredLeases` is accepted and not used.

    `kv` are operations on keys that belong to it, and `timers` those on timers. Keys are judged first; the results of
    these come after the others.
    """

    operations: list[Step]
    required_leases: Any = msgspec.field(default=None, name="requiredLeases")
    kv: list[KvOperation] | None = None
    timers: list[TimerOperation] | None = None


class _Operation(msgspec.Struct, forbid_unknown_fields=True):
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


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    operations: list[Step]
    required_leases: Any = msgspec.field(default=None, name="requiredLeases")
    kv: msgspec.Raw = NULL
    timers: msgspec.Raw = NULL


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    operations: list[_Operation]
    required_leases: Any = msgspec.field(default=None, name="requiredLeases")
    kv: msgspec.Raw = NULL
    timers: msgspec.Raw = NULL


_transaction = msgspec.json.Decoder(_Strict)
_body = msgspec.json.Decoder(_Body)
_items = msgspec.json.Decoder(list[LooseItem])


class CountedOperations(list[Operation]):
    """The operations of a transaction whose pushes and acknowledgments are to be counted in the answer, not listed."""


def decode_transaction(body: bytes) -> list[Operation]:
    """The operations (at least one) of a transaction. Raises `BadRequest` that says which is wrong, and how."""
    if not body.startswith(TRANSACTION_MAGIC):
        return _decode_json(body)
    head, push = decode_binary_transaction(body)
    pushes = [PushOperation(item) for item in push.items]
    read = _decode_json(head, pushes) if head else pushes
    if not read:
        raise BadRequest("operations array cannot be empty")
    return CountedOperations(read) if push.counts else [*read]


def _decode_json(body: bytes, pushes: Sequence[Operation] = ()) -> list[Operation]:
    """The operations, with `pushes` after those that push and acknowledge."""
    check_utf8(body)
    try:
        sent = _transaction.decode(body)
    except (msgspec.DecodeError, RecursionError):
        # With `data` for `payload`, an optional field of another type (which counts as absent), or a mistake.
        return _decode_loosely(body, pushes)
    read: list[Operation] = []
    for index, step in enumerate(sent.operations):
        where = f"operations[{index}]"
        if isinstance(step, PushStep):
            check_items(step.items, f"{where}.items")
            read += map(PushOperation, step.items)
        elif isinstance(step, AckStep):
            read.append(
                _ack(
                    step.transaction_id,
                    step.partition_id,
                    step.status or "",
                    step.consumer_group or "",
                    step.lease_id or "",
                    step.error or "",
                    where,
                )
            )
        elif isinstance(step, EnqueueStep):
            check_enqueue(step.items, f"{where}.items")
            read += map(EnqueueOperation, step.items)
        else:
            check_ref(step, f"{where}.")
            read.append(AckItemOperation(step))
    return _with_riders([*read, *pushes] if pushes else read, sent)


def _with_riders(read: list[Operation], sent: _Strict | _Body) -> list[Operation]:
    """The operations, those on keys after them, and then those on timers."""
    if sent.kv != NULL:
        read += map(KvRider, decode_riders(sent.kv))
    if sent.timers != NULL:
        read += map(TimerRider, decode_timer_riders(sent.timers))
    if not sent.operations and not read:
        raise BadRequest("operations array cannot be empty")
    return read


def _decode_loosely(body: bytes, pushes: Sequence[Operation]) -> list[Operation]:
    try:
        sent = _body.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _explain(body, error) from error
    read: list[Operation] = []
    for index, operation in enumerate(sent.operations):
        where = f"operations[{index}]"
        if operation.type == "push":
            items = read_items(_push_items(operation, where, body), f"{where}.items", _EMPTY)
            read += map(PushOperation, items)
        elif operation.type == "ack":
            read.append(
                _ack(
                    operation.transaction_id,
                    operation.partition_id,
                    _text(operation.status),
                    _text(operation.group),
                    _text(operation.lease_id),
                    _text(operation.error),
                    where,
                )
            )
        elif operation.type == "enqueue":
            read += map(EnqueueOperation, decode_enqueue_items(operation.items, f"{where}.items"))
        elif operation.type == "ackItem":
            ref = {key: getattr(operation, key) for key in ("id", "namespace", "topic", "lease_owner")}
            read.append(AckItemOperation(decode_item_ref(ref, where)))
        else:
            read.append(UnknownOperation(str(operation.type)))
    return _with_riders([*read, *pushes], sent)


def _push_items(operation: _Operation, where: str, body: bytes) -> list[LooseItem]:
    if operation.items == NULL:
        raise BadRequest(f"items array is required (at {where}.items)")
    try:
        return _items.decode(operation.items)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _explain(body, error) from error


def _ack(
    transaction_id: object, partition_id: object, status: str, group: str, lease_id: str, error: str, where: str
) -> AckOperation:
    if not isinstance(transaction_id, str) or not transaction_id:
        raise BadRequest(f"transactionId is required (at {where}.transactionId)")
    if not isinstance(partition_id, str) or not partition_id:
        raise BadRequest(f"partitionId is required (at {where}.partitionId)")
    if group:
        check_name(group, "ConsumerGroup", f"{where}.consumerGroup")
    return AckOperation(transaction_id, partition_id, status or "completed", group or None, lease_id, error)


def _text(value: object) -> str:
    """An optional field; what is not text counts as absent."""
    return value if isinstance(value, str) else ""


def _explain(body: bytes, error: Exception) -> BadRequest:
    """Find what the decoder refused."""
    sent = decode_object(body)
    operations = sent.get("operations")
    if not isinstance(operations, list):
        return BadRequest("operations array required")
    for key in sent:
        if key not in field_names(TransactionBody):
            return unknown(key, field_names(TransactionBody))
    for index, operation in enumerate(operations):
        where = f"operations[{index}]"
        if not isinstance(operation, dict):
            return BadRequest(f"Each operation must be an object (at {where})")
        for key in operation:
            if key not in field_names(_Operation):
                return unknown(key, field_names(_Operation), where)
        items = operation.get("items")
        if items is None:
            continue
        if not isinstance(items, list):
            return BadRequest(f"items array is required (at {where}.items)")
        for position, item in enumerate(items):
            if not isinstance(item, dict):
                return BadRequest(f"Each item must be an object (at {where}.items[{position}])")
            for key in item if operation.get("type") == "push" else ():
                if key not in field_names(LooseItem):
                    return unknown(key, field_names(LooseItem), f"{where}.items[{position}]")
    return BadRequest(f"Invalid request: {error}")
