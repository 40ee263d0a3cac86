"""The body of a push: decoded in one pass, payloads left as the bytes they came as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from queen.errors import BadRequest
from queen.wire.ids import is_uuid

LONGEST_NAME = 255
DEFAULT_PARTITION = "Default"
NULL = msgspec.Raw(b"null")
_DEFAULT_BUFFER_MS = 1000
LONGEST_BUFFER_MS = 3_600_000
_DEFAULT_BUFFER_MAX = 100
MOST_BUFFERED = 1_000_000


class PushItem(msgspec.Struct):
    """One message on its way in."""

    queue: str
    partition: str = DEFAULT_PARTITION
    payload: msgspec.Raw = NULL
    transaction_id: str = msgspec.field(default="", name="transactionId")
    trace_id: str = msgspec.field(default="", name="traceId")


@dataclass(frozen=True, slots=True)
class Hold:
    """How long a push may stay in the spool, and how many messages may gather there."""

    seconds: float
    messages: int


class PushBody(msgspec.Struct):
    items: list[PushItem]
    buffer_ms: Any = msgspec.field(default=None, name="bufferMs")
    buffer_max: Any = msgspec.field(default=None, name="bufferMax")

    @property
    def hold(self) -> Hold | None:
        """What the request says about buffering; None when it says nothing. Raises `BadRequest` for nonsense."""
        if _is_unset(self.buffer_ms) and _is_unset(self.buffer_max):
            return None
        milliseconds = _whole(self.buffer_ms, "bufferMs", _DEFAULT_BUFFER_MS, LONGEST_BUFFER_MS)
        return Hold(milliseconds / 1000, _whole(self.buffer_max, "bufferMax", _DEFAULT_BUFFER_MAX, MOST_BUFFERED))


_push_body = msgspec.json.Decoder(PushBody)
_any = msgspec.json.Decoder()


def decode_push(body: bytes) -> PushBody:
    """A push, each item of it valid. Raises `BadRequest` that says which item is wrong, and how."""
    if not body:
        raise BadRequest("Empty request body")
    check_utf8(body)
    try:
        push = _push_body.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _explain(body, error) from error
    check_items(push.items)
    return push


def check_items(items: list[PushItem], where: str = "items") -> None:
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
    """The decoder passes payloads over without reading their text, so bad bytes are looked for here."""
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


def _explain(body: bytes, error: Exception) -> BadRequest:
    """Find what the fast decoder refused, in the words of the contract."""
    if isinstance(error, RecursionError):
        return BadRequest("Invalid JSON: nested too deeply")
    try:
        value = _any.decode(body)
    except RecursionError:
        return BadRequest("Invalid JSON: nested too deeply")
    except msgspec.DecodeError as malformed:
        return BadRequest(f"Invalid JSON: {malformed}")
    items = value.get("items") if isinstance(value, dict) else None
    if not isinstance(items, list):
        return BadRequest("items array is required")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            return BadRequest(f"Each item must be an object (at items[{index}])")
        for key, what, needed in (
            ("queue", "Queue", True),
            ("partition", "Partition", False),
            ("transactionId", "TransactionId", False),
            ("traceId", "TraceId", False),
        ):
            if (needed or key in item) and not isinstance(item.get(key), str):
                return BadRequest(f"{what} must be a string (at items[{index}].{key})")
    return BadRequest(f"Invalid request: {error}")


class LooseItem(msgspec.Struct):
    """An item whose fields have not been looked at."""

    queue: Any = None
    partition: Any = DEFAULT_PARTITION
    payload: msgspec.Raw = NULL
    transaction_id: Any = msgspec.field(default="", name="transactionId")
    trace_id: Any = msgspec.field(default="", name="traceId")


def read_items(items: Sequence[LooseItem], where: str) -> list[PushItem]:
    """The items, each one valid. Raises `BadRequest` that says which is wrong, and how."""
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
        pushes.append(PushItem(item.queue, item.partition, item.payload, item.transaction_id, item.trace_id))
    check_items(pushes, where)
    return pushes
