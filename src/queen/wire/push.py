"""The body of a push: decoded in one pass, payloads left as the bytes they came as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from queen.errors import BadRequest
from queen.wire.decode import check_known, field_names, malformed, refusal
from queen.wire.ids import is_uuid

LONGEST_NAME = 255
DEFAULT_PARTITION = "Default"
NULL = msgspec.Raw(b"null")
_DEFAULT_BUFFER_MS = 1000
LONGEST_BUFFER_MS = 3_600_000
_DEFAULT_BUFFER_MAX = 100
MOST_BUFFERED = 1_000_000
_EXPLAINED_BYTES = 1 << 20


# What `check_name` calls printable: neither control characters nor any space but the plain one.
PRINTABLE = r"^[\p{L}\p{M}\p{N}\p{P}\p{S} ]*$"
_UUID = "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12})?$"

# Limits that the JSON schema states and `check_items` holds: checked by the decoder they would cost twice as much.
NameText: TypeAlias = Annotated[
    str, Meta(extra_json_schema={"minLength": 1, "maxLength": LONGEST_NAME, "pattern": PRINTABLE})
]
TransactionIdText: TypeAlias = Annotated[
    str,
    Meta(
        extra_json_schema={
            "maxLength": LONGEST_NAME,
            "description": "Unique in its partition; made by the server when absent or empty.",
        }
    ),
]
TraceIdText: TypeAlias = Annotated[str, Meta(extra_json_schema={"pattern": _UUID, "description": "A UUID, or empty."})]


class PushItem(msgspec.Struct, forbid_unknown_fields=True):
    """One message to store; its payload is any JSON value."""

    queue: NameText
    partition: NameText = DEFAULT_PARTITION
    # A factory, since a JSON schema can show no default that is raw JSON.
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: NULL)
    transaction_id: TransactionIdText = msgspec.field(default="", name="transactionId")
    trace_id: TraceIdText = msgspec.field(default="", name="traceId")


@dataclass(frozen=True, slots=True)
class Hold:
    """How long a push may stay in the spool, and how many messages may gather there."""

    seconds: float
    messages: int


class PushRequest(msgspec.Struct):
    """Items to store (at least one), the size of the body they came in, and the subject of the token that sent them.

    With a `hold` they go to the spool, and from there to PostgreSQL when that says.
    """

    items: list[PushItem]
    nbytes: int
    subject: str | None = None
    hold: Hold | None = None


class PushBody(msgspec.Struct, forbid_unknown_fields=True):
    """Messages to store, in order; they may name different queues and partitions."""

    items: list[PushItem]
    buffer_ms: Annotated[
        Any,
        Meta(
            extra_json_schema={
                "type": ["integer", "null"],
                "minimum": 0,
                "maximum": LONGEST_BUFFER_MS,
                "description": "Keep them on disk for so many milliseconds at most before they go to PostgreSQL.",
            }
        ),
    ] = msgspec.field(default=None, name="bufferMs")
    buffer_max: Annotated[
        Any,
        Meta(
            extra_json_schema={
                "type": ["integer", "null"],
                "minimum": 0,
                "maximum": MOST_BUFFERED,
                "description": "The same, until so many messages have gathered.",
            }
        ),
    ] = msgspec.field(default=None, name="bufferMax")

    @property
    def hold(self) -> Hold | None:
        """What the request says about buffering; None when it says nothing. Raises `BadRequest` for nonsense."""
        if self.buffer_ms is None and self.buffer_max is None:
            return None
        if _is_unset(self.buffer_ms) and _is_unset(self.buffer_max):
            return None
        milliseconds = _whole(self.buffer_ms, "bufferMs", _DEFAULT_BUFFER_MS, LONGEST_BUFFER_MS)
        return Hold(milliseconds / 1000, _whole(self.buffer_max, "bufferMax", _DEFAULT_BUFFER_MAX, MOST_BUFFERED))


class LooseItem(msgspec.Struct, forbid_unknown_fields=True):
    """An item whose fields have not been checked. `data` stands for `payload`; the last three are never read."""

    queue: Any = None
    partition: Any = DEFAULT_PARTITION
    payload: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    transaction_id: Any = msgspec.field(default="", name="transactionId")
    trace_id: Any = msgspec.field(default="", name="traceId")
    message_id: Any = msgspec.field(default=None, name="messageId")
    producer_sub: Any = msgspec.field(default=None, name="producerSub")
    namespace: Any = None
    task: Any = None


class _LooseBody(msgspec.Struct, forbid_unknown_fields=True):
    items: list[LooseItem]
    buffer_ms: Any = msgspec.field(default=None, name="bufferMs")
    buffer_max: Any = msgspec.field(default=None, name="bufferMax")


_push_body = msgspec.json.Decoder(PushBody)
_loose_body = msgspec.json.Decoder(_LooseBody)
_any = msgspec.json.Decoder()


def decode_push(body: bytes) -> PushBody:
    """A push, each item of it valid. Raises `BadRequest` that says which item is wrong, and how."""
    if not body:
        raise BadRequest("Empty request body")
    check_utf8(body)
    try:
        push = _push_body.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        return _decode_loosely(body, error)
    check_items(push.items)
    return push


def _decode_loosely(body: bytes, error: Exception) -> PushBody:
    """A push whose items have `data` in place of `payload`, or fields that are accepted and not used."""
    try:
        loose = _loose_body.decode(body)
    except (msgspec.DecodeError, RecursionError) as again:
        raise _explain(body, error, again) from again
    return PushBody(read_items(loose.items, "items"), loose.buffer_ms, loose.buffer_max)


def _explain(body: bytes, error: Exception, again: Exception) -> BadRequest:
    """What is wrong with a push that cannot be decoded."""
    if len(body) > _EXPLAINED_BYTES:
        # As objects it would take many times the memory.
        return refusal(again, PushBody)
    try:
        value = _parsed(body, error)
        items = value.get("items") if isinstance(value, dict) else None
        if not isinstance(items, list):
            return BadRequest("items array is required")
        check_known(value, field_names(PushBody))
        check_loose_items(items, "items")
    except BadRequest as found:
        return found
    return refusal(again, PushBody)


def check_loose_items(items: Sequence[object], where: str) -> None:
    """Raises `BadRequest` for the first that is no object, or has an unknown field."""
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise BadRequest(f"Each item must be an object (at {where}[{index}])")
        check_known(item, field_names(LooseItem), f"{where}[{index}]")


def check_items(items: Sequence[PushItem], where: str = "items") -> None:
    """Names and ids within their limits; raises `BadRequest` for the first that is not."""
    checked: tuple[str, str] | None = None
    for index, item in enumerate(items):
        target = (item.queue, item.partition)
        # Most pushes name one queue and partition again and again.
        if target != checked:
            check_name(item.queue, "Queue", f"{where}[{index}].queue")
            check_name(item.partition, "Partition", f"{where}[{index}].partition")
            checked = target
        if len(item.transaction_id) > LONGEST_NAME:
            raise BadRequest(
                f"TransactionId must be at most {LONGEST_NAME} characters (at {where}[{index}].transactionId)"
            )
        if item.trace_id and not is_uuid(item.trace_id):
            raise BadRequest(f"TraceId must be a UUID (at {where}[{index}].traceId)")


def check_name(name: str, what: str, where: str) -> None:
    """A queue, partition or group name: 1 to 255 printable characters."""
    if not name:
        raise BadRequest(f"{what} must not be empty (at {where})")
    if len(name) > LONGEST_NAME:
        raise BadRequest(f"{what} must be at most {LONGEST_NAME} characters, not {len(name)} (at {where})")
    if not name.isprintable():
        raise BadRequest(f"{what} must not contain control characters (at {where})")


def check_utf8(body: bytes) -> None:
    """The decoder passes payloads over without reading their text, so invalid UTF-8 is detected here."""
    if body.isascii():
        return
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"Invalid JSON: not UTF-8 at byte {error.start}") from error


def _whole(value: Any, what: str, default: int, most: int) -> int:
    if _is_unset(value):
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise BadRequest(f"{what} must be a whole number from 1 to {most}")
    return value


def _is_unset(value: Any) -> bool:
    return value is None or (type(value) is int and value == 0)


def _parsed(body: bytes, error: Exception) -> Any:
    if isinstance(error, RecursionError):
        raise malformed(error) from error
    try:
        return _any.decode(body)
    except (msgspec.DecodeError, RecursionError) as again:
        raise malformed(again) from again


def read_items(items: Sequence[LooseItem], where: str, absent: msgspec.Raw = NULL) -> list[PushItem]:
    """The items, each one valid; without a payload they carry `absent`. Raises `BadRequest` for the first bad one."""
    pushes = []
    for index, item in enumerate(items):
        for value, what, key in (
            (item.queue, "Queue", "queue"),
            (item.partition, "Partition", "partition"),
            (item.transaction_id, "TransactionId", "transactionId"),
            (item.trace_id, "TraceId", "traceId"),
        ):
            if not isinstance(value, str):
                raise BadRequest(f"{what} must be a string (at {where}[{index}].{key})")
        payload = item.payload if item.data is msgspec.UNSET else item.data
        if item.payload is not msgspec.UNSET and item.data is not msgspec.UNSET:
            raise BadRequest(f"payload and data exclude each other: send one of them (at {where}[{index}].data)")
        if payload is msgspec.UNSET:
            payload = absent
        pushes.append(PushItem(item.queue, item.partition, payload, item.transaction_id, item.trace_id))
    check_items(pushes, where)
    return pushes
