"""Messages of SQS: their attributes, checksums, limits and receipt handles, and how they are stored."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from queen.http.sqs.errors import SqsError, invalid_handle, invalid_parameter, invalid_value, missing_parameter

_MOST_ATTRIBUTES: Final = 10
_ATTRIBUTE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_DATA_TYPE: Final = re.compile(r"(String|Number|Binary)(\..+)?", re.DOTALL)
_NUMBER: Final = re.compile(r"[+-]?(?=\.?[0-9])([0-9]{0,200})(?:\.([0-9]{0,200}))?(?:[eE][+-]?[0-9]{1,4})?")
_FORBIDDEN: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_GROUP: Final = re.compile(r"[!-~]{1,128}")
_SYSTEM_NAMES: Final = frozenset({"AWSTraceHeader"})
SYSTEM_ATTRIBUTES: Final = frozenset(
    {
        "All",
        "ApproximateFirstReceiveTimestamp",
        "ApproximateReceiveCount",
        "AWSTraceHeader",
        "DeadLetterQueueSourceArn",
        "MessageDeduplicationId",
        "MessageGroupId",
        "SenderId",
        "SentTimestamp",
        "SequenceNumber",
    }
)


class Attribute(msgspec.Struct, array_like=True, frozen=True):
    """The value of a message attribute: text, or base64 for a binary type."""

    kind: str
    value: str

    @property
    def is_binary(self) -> bool:
        return self.kind.startswith("Binary")

    @property
    def raw(self) -> bytes:
        return base64.b64decode(self.value) if self.is_binary else self.value.encode()

    def shown(self) -> dict[str, str]:
        return {"BinaryValue" if self.is_binary else "StringValue": self.value, "DataType": self.kind}


Attributes = Mapping[str, Attribute]


class Envelope(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What is stored with the body of a message. `id`, `sent` (ms) and `source` are of one that was moved here."""

    attributes: dict[str, Attribute] = {}
    system: dict[str, Attribute] = {}
    sender: str = ""
    group: str = ""
    deduplication: str = ""
    id: str = ""
    sent: int = 0
    source: str = ""


class FifoPayload(msgspec.Struct, kw_only=True):
    """The payload of a message of a FIFO queue."""

    body: str = msgspec.field(name="sqsBody")
    envelope: Envelope = msgspec.field(name="sqs")


class Outgoing(msgspec.Struct, kw_only=True):
    """A message to be sent; `key` has it stored once, however often it is."""

    body: str
    envelope: Envelope
    delay: int | None = None
    key: str = ""


class Sent(msgspec.Struct):
    """A message that was stored."""

    id: str
    sequence: str = ""


class Received(msgspec.Struct, kw_only=True):
    """A message that is delivered."""

    id: str
    handle: str
    body: str
    envelope: Envelope
    receives: int
    first_ms: int
    sent_ms: int
    sequence: str = ""


class Handle(msgspec.Struct, array_like=True, frozen=True):
    """What a receipt handle says: the queue, the message, and its lease.

    Of a FIFO queue also where the message stands in the lease, and of how many; 0 if they are not all delivered.
    """

    queue: str
    message: str
    lease: str
    partition: str = ""
    transaction: str = ""
    place: int = 0
    count: int = 0


_envelope_decoder: Final = msgspec.json.Decoder(Envelope)
_handle_decoder: Final = msgspec.json.Decoder(Handle)
encode: Final = msgspec.json.Encoder().encode


def decode_envelope(raw: bytes | None) -> Envelope:
    """The envelope in the metadata of an item; an empty one where something else stands there."""
    if not raw:
        return Envelope()
    try:
        return _envelope_decoder.decode(raw)
    except msgspec.DecodeError:
        return Envelope()


def write_handle(handle: Handle) -> str:
    return base64.urlsafe_b64encode(encode(handle)).decode()


def read_handle(text: object, queue: str) -> Handle:
    """Raises `SqsError` for what is no receipt handle of this queue."""
    if not isinstance(text, str) or not text:
        raise missing_parameter("ReceiptHandle")
    try:
        handle = _handle_decoder.decode(base64.b64decode(text, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, msgspec.DecodeError, UnicodeDecodeError):
        raise invalid_handle(text) from None
    if handle.queue != queue:
        raise invalid_handle(text)
    return handle


def checked_body(body: object, *, most: int) -> str:
    if not isinstance(body, str):
        raise missing_parameter("MessageBody")
    if not body:
        raise missing_parameter("MessageBody")
    if _FORBIDDEN.search(body):
        raise SqsError(
            "InvalidMessageContents",
            "The message contains characters outside the allowed set: #x9 | #xA | #xD | #x20 to #xD7FF | #xE000 to "
            "#xFFFD | #x10000 to #x10FFFF",
        )
    return body


def check_size(size: int, most: int) -> None:
    if size > most:
        raise invalid_parameter(
            f"One or more parameters are invalid. Reason: Message must be shorter than {most} bytes."
        )


def size_of(body: str, attributes: Attributes) -> int:
    """What counts against the limit: the body, and names, types and values of attributes."""
    return len(body.encode()) + sum(
        len(name) + len(one.kind.encode()) + len(one.raw) for name, one in attributes.items()
    )


def read_attributes(sent: object, *, system: bool = False) -> dict[str, Attribute]:
    """Message attributes as a client sends them, checked."""
    if sent is None:
        return {}
    if not isinstance(sent, dict):
        raise invalid_parameter("Message attributes must be a map of names to values.")
    if len(sent) > _MOST_ATTRIBUTES:
        raise invalid_parameter(
            f"Number of message attributes [{len(sent)}] exceeds the allowed maximum [{_MOST_ATTRIBUTES}]."
        )
    return {name: _read_attribute(name, value, system) for name, value in sent.items()}


def _read_attribute(name: str, value: object, system: bool) -> Attribute:
    if system and name not in _SYSTEM_NAMES:
        raise invalid_parameter(f"Message system attribute name '{name[:80]}' is invalid.")
    if not _ATTRIBUTE_NAME.fullmatch(name) or name.lower().startswith(("aws.", "amazon.")) or ".." in name:
        raise invalid_parameter(
            f"The message attribute name '{name[:80]}' is invalid. Attribute name can contain A-Z, a-z, 0-9, "
            "underscore (_), hyphen (-), and period (.) characters."
        )
    if name.startswith(".") or name.endswith("."):
        raise invalid_parameter(f"Message attribute name '{name}' starts or ends with a period.")
    kind = value.get("DataType") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not kind:
        raise invalid_parameter(f"The message attribute '{name}' must contain non-empty message attribute type.")
    found = _DATA_TYPE.fullmatch(kind) if isinstance(kind, str) else None
    if found is None or len(kind) > 256:
        raise invalid_parameter(
            f"The message attribute '{name}' has an invalid message attribute type, the set of supported type prefixes "
            "is Binary, Number, and String."
        )
    if value.get("StringListValues") or value.get("BinaryListValues"):
        raise invalid_parameter(f"The message attribute '{name}' has a list of values, which is not supported.")
    binary = found[1] == "Binary"
    text = value.get("BinaryValue" if binary else "StringValue")
    if not isinstance(text, str) or not text:
        raise invalid_parameter(
            f"The message attribute '{name}' must contain non-empty message attribute value for message attribute type "
            f"'{found[1]}'."
        )
    if binary:
        try:
            base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise invalid_parameter(f"The message attribute '{name}' has a BinaryValue that is not base64.") from None
    elif _FORBIDDEN.search(text):
        raise SqsError(
            "InvalidMessageContents", f"The message attribute '{name}' has characters outside the allowed set."
        )
    elif found[1] == "Number" and not _is_number(text):
        raise invalid_parameter(f"Can't cast the value of message (user) attribute '{name}' to a number.")
    return Attribute(kind, text)


def _is_number(text: str) -> bool:
    """Up to 38 digits, from 10^-128 to 10^126."""
    found = _NUMBER.fullmatch(text)
    if found is None or len((found[1] + (found[2] or "")).strip("0")) > 38:
        return False
    size = abs(float(text))
    return size == 0 or 1e-128 <= size <= 1e126


def read_group(sent: object, parameter: str) -> str:
    """A group or deduplication id; empty when absent."""
    if sent is None:
        return ""
    if not isinstance(sent, str) or not _GROUP.fullmatch(sent):
        raise invalid_value(
            str(sent)[:128],
            parameter,
            f"{parameter} can only include alphanumeric and punctuation characters. 1 to 128 in length.",
        )
    return sent


def md5_of_body(body: str) -> str:
    return hashlib.md5(body.encode(), usedforsecurity=False).hexdigest()


def md5_of_attributes(attributes: Attributes) -> str:
    """The checksum that SDKs verify: over names, types and values, each with its length, by name."""
    digest = hashlib.md5(usedforsecurity=False)
    for name in sorted(attributes):
        one = attributes[name]
        for part in (name.encode(), one.kind.encode()):
            digest.update(struct.pack("!I", len(part)) + part)
        raw = one.raw
        digest.update((b"\x02" if one.is_binary else b"\x01") + struct.pack("!I", len(raw)) + raw)
    return digest.hexdigest()


def chosen_attributes(attributes: Attributes, names: Iterable[str]) -> dict[str, Attribute]:
    """The attributes that a receive selects: by name, by prefix (`name.*`), or all."""
    exact, prefixes = set(), []
    for name in names:
        if name in ("All", ".*"):
            return dict(attributes)
        if name.endswith(".*"):
            prefixes.append(name[:-2])
        exact.add(name)
    return {
        name: one
        for name, one in attributes.items()
        if name in exact or any(name.startswith(some) for some in prefixes)
    }


def system_attributes(message: Received, names: Iterable[str]) -> dict[str, str]:
    """The attributes that the server keeps of a message, those that are requested."""
    envelope = message.envelope
    known = {
        "SenderId": envelope.sender or "anonymous",
        "SentTimestamp": str(message.sent_ms),
        "ApproximateReceiveCount": str(message.receives),
        "ApproximateFirstReceiveTimestamp": str(message.first_ms),
        "SequenceNumber": message.sequence,
        "MessageDeduplicationId": envelope.deduplication,
        "MessageGroupId": envelope.group,
        "DeadLetterQueueSourceArn": envelope.source,
    }
    if "AWSTraceHeader" in envelope.system:
        known["AWSTraceHeader"] = envelope.system["AWSTraceHeader"].value
    wanted = set(names)
    return {name: value for name, value in known.items() if value and ("All" in wanted or name in wanted)}
