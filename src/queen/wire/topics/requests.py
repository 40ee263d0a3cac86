"""Request bodies of topics."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from queen.errors import BadRequest
from queen.wire.decode import refusal
from queen.wire.ids import LARGEST_ID
from queen.wire.push import LONGEST_NAME, PRINTABLE, NameText, check_name, check_utf8

MOST_ITEMS: Final = 10_000
MOST_NAMES: Final = 1000
LARGEST_METADATA: Final = 65_536
LONGEST_SECONDS: Final = 10 * 366 * 86_400
LONGEST_LEASE: Final = 7 * 86_400
# Clients in Go send the zero of their time type, in the year 1, for none.
_NO_TIME_BEFORE: Final = datetime(1970, 1, 1, tzinfo=UTC)

Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_SECONDS)]
LeaseSeconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=LONGEST_LEASE)]

_OptionalName: TypeAlias = Annotated[
    str, msgspec.Meta(extra_json_schema={"maxLength": LONGEST_NAME, "pattern": PRINTABLE})
]

T = TypeVar("T")


class EnqueueItem(msgspec.Struct, forbid_unknown_fields=True):
    """An item: `payload` in base64 or `data`, any JSON; due now, at `deliver_after`, or after `delay` seconds."""

    namespace: NameText
    topic: NameText
    payload: bytes | None = None
    data: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    idempotency_key: _OptionalName | None = None
    priority: Annotated[Priority, msgspec.Meta(description="Lower is served first.")] | None = None
    metadata: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": ["object", "null"]})] = msgspec.field(
        default_factory=msgspec.Raw
    )
    deliver_after: datetime | None = None
    delay: Seconds | None = None
    ttl: Annotated[Seconds, msgspec.Meta(description="Seconds that it may wait once it is due.")] | None = None

    @property
    def is_json(self) -> bool:
        return bool(self.data)

    @property
    def stored_payload(self) -> bytes:
        return bytes(self.data) if self.data else self.payload or b""

    @property
    def stored_metadata(self) -> bytes | None:
        raw = bytes(self.metadata)
        return raw if raw and raw != b"null" else None


class ItemRef(msgspec.Struct, forbid_unknown_fields=True):
    """The item of a request. `lease_owner`, when it is sent, has to be that of the current lease."""

    id: int | str
    namespace: NameText
    topic: NameText
    lease_owner: str | None = None

    @property
    def number(self) -> int:
        """The id; 0, which no item has, when it is not one."""
        text = self.id
        if isinstance(text, str):
            text = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
        return text if 0 <= text <= LARGEST_ID else 0


class NackRef(ItemRef):
    """An item that failed, and why; with `dlq` it is not retried, but a dead letter at once."""

    error: str | None = None
    dlq: bool = False


class ExtendRef(ItemRef):
    """An item whose lease is extended, by default as long as a lease of its topic."""

    seconds: LeaseSeconds | None = None


class TopicName(msgspec.Struct, forbid_unknown_fields=True):
    """A topic."""

    namespace: NameText
    topic: NameText


class PurgeBody(TopicName):
    """A topic whose items are removed."""

    leased: bool = True
    """Whether the items that are leased are removed, too."""


class ConfigureBody(TopicName):
    """A topic, and the options to set; an option that is not sent stays as it is."""

    options: dict[str, Any] | None = None


class QuotaBody(msgspec.Struct, forbid_unknown_fields=True):
    """Items that a namespace may enqueue in a minute; null: NAMESPACE_QUOTAS decides."""

    namespace: NameText
    per_minute: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None


class ModeBody(msgspec.Struct, forbid_unknown_fields=True):
    """The write mode of a namespace; null: NAMESPACE_MODES decides."""

    namespace: NameText
    mode: Literal["sync", "buffered"] | None


_enqueue = msgspec.json.Decoder(list[EnqueueItem] | EnqueueItem)
_enqueue_items = msgspec.json.Decoder(list[EnqueueItem])
_names = msgspec.json.Decoder(list[str])
_acks = msgspec.json.Decoder(list[ItemRef] | ItemRef)
_nacks = msgspec.json.Decoder(list[NackRef] | NackRef)
_extends = msgspec.json.Decoder(list[ExtendRef] | ExtendRef)
_name = msgspec.json.Decoder(TopicName)
_purge = msgspec.json.Decoder(PurgeBody)
_configure = msgspec.json.Decoder(ConfigureBody)
_quota = msgspec.json.Decoder(QuotaBody)
_mode = msgspec.json.Decoder(ModeBody)


def decode_enqueue(body: bytes) -> list[EnqueueItem]:
    """The items of an enqueue, each one valid. Raises `BadRequest` that says which is wrong, and how."""
    check_utf8(body)
    decoded = _decode(_enqueue, body)
    items = decoded if isinstance(decoded, list) else [decoded]
    check_enqueue(items, "" if decoded is items else None)
    return items


def decode_enqueue_items(array: bytes, where: str) -> list[EnqueueItem]:
    """The items of an array inside a larger body (at `where`)."""
    items = _decode(_enqueue_items, array, where)
    check_enqueue(items, where)
    return items


def decode_item_ref(ref: Mapping[str, object], where: str) -> ItemRef:
    """The item that fields of a larger body identify; None counts as absent."""
    try:
        item = msgspec.convert({key: value for key, value in ref.items() if value is not None}, ItemRef)
    except msgspec.ValidationError as error:
        raise refusal(error, ItemRef, where) from error
    check_ref(item, f"{where}.")
    return item


def check_enqueue(items: list[EnqueueItem], where: str | None) -> None:
    """Check names, keys, times and metadata; `where` is None for a single item."""
    _check_count(len(items))
    checked: tuple[str, str] | None = None
    for index, item in enumerate(items):
        at = "" if where is None else f"{where}[{index}]."
        if (item.namespace, item.topic) != checked:
            check_topic(item.namespace, item.topic, at)
            checked = (item.namespace, item.topic)
        if item.idempotency_key == "":
            item.idempotency_key = None
        elif item.idempotency_key is not None:
            check_name(item.idempotency_key, "idempotency_key", f"{at}idempotency_key")
        if item.data and item.payload is not None:
            raise BadRequest(f"payload and data exclude each other: send one of them (at {at}data)")
        if item.metadata:
            _check_metadata(bytes(item.metadata), at)
        if item.deliver_after is not None:
            item.deliver_after = _moment(item.deliver_after, at)
        if item.delay is not None and item.deliver_after is not None:
            raise BadRequest(f"deliver_after and delay exclude each other: send one of them (at {at}delay)")


def decode_acks(body: bytes) -> tuple[list[ItemRef], bool]:
    """The items of a request, and whether they were in an array."""
    return _refs(_decode(_acks, body))


def decode_nacks(body: bytes) -> tuple[list[NackRef], bool]:
    return _refs(_decode(_nacks, body))


def decode_extends(body: bytes) -> tuple[list[ExtendRef], bool]:
    return _refs(_decode(_extends, body))


def decode_topic(body: bytes) -> TopicName:
    name = _decode(_name, body)
    check_topic(name.namespace, name.topic)
    return name


def decode_purge(body: bytes) -> PurgeBody:
    sent = _decode(_purge, body)
    check_topic(sent.namespace, sent.topic)
    return sent


def decode_configure(body: bytes) -> ConfigureBody:
    sent = _decode(_configure, body)
    check_topic(sent.namespace, sent.topic)
    return sent


def decode_quota(body: bytes) -> QuotaBody:
    sent = _decode(_quota, body)
    check_name(sent.namespace, "Namespace", "namespace")
    return sent


def decode_names(text: str) -> list[str]:
    """The topics that the query parameter `topics` names, a JSON array; none when it is empty."""
    if not text:
        return []
    names = _decode(_names, text.encode(), "topics")
    if len(names) > MOST_NAMES:
        raise BadRequest(f"topics may name at most {MOST_NAMES} topics, not {len(names)}")
    for index, name in enumerate(names):
        check_name(name, "Topic", f"topics[{index}]")
    return names


def decode_mode(body: bytes) -> ModeBody:
    sent = _decode(_mode, body)
    check_name(sent.namespace, "Namespace", "namespace")
    return sent


def check_topic(namespace: str, topic: str, at: str = "") -> None:
    check_name(namespace, "Namespace", f"{at}namespace")
    check_name(topic, "Topic", f"{at}topic")


Ref = TypeVar("Ref", bound=ItemRef)


def _refs(decoded: list[Ref] | Ref) -> tuple[list[Ref], bool]:
    refs, several = (decoded, True) if isinstance(decoded, list) else ([decoded], False)
    _check_count(len(refs))
    checked = None
    for index, ref in enumerate(refs):
        # Most requests are about one topic and of one owner: what was right for the last item is for this one.
        if (parts := (ref.namespace, ref.topic, ref.lease_owner)) != checked:
            check_ref(ref, f"[{index}]." if several else "")
            checked = parts
    return refs, several


def check_ref(ref: ItemRef, at: str) -> None:
    """Raises `BadRequest` when a name or the lease owner cannot be stored."""
    check_topic(ref.namespace, ref.topic, at)
    if ref.lease_owner is not None and "\0" in ref.lease_owner:
        raise BadRequest(f"lease_owner must not contain NUL (at {at}lease_owner)")


def _check_count(count: int) -> None:
    if not count:
        raise BadRequest("the array is empty: send at least one item")
    if count > MOST_ITEMS:
        raise BadRequest(f"a request may hold at most {MOST_ITEMS} items, not {count}: send several")


def _check_metadata(raw: bytes, at: str) -> None:
    if raw == b"null":
        return
    if raw[:1] != b"{":
        raise BadRequest(f"metadata must be a JSON object (at {at}metadata)")
    if len(raw) > LARGEST_METADATA:
        raise BadRequest(f"metadata must be at most {LARGEST_METADATA} bytes, not {len(raw)} (at {at}metadata)")


def _moment(given: datetime, at: str) -> datetime | None:
    try:
        moment = given.astimezone(UTC) if given.tzinfo else given.replace(tzinfo=UTC)
    except OverflowError:
        raise BadRequest(f"deliver_after is out of range (at {at}deliver_after)") from None
    return moment if moment >= _NO_TIME_BEFORE else None


def _decode(decoder: msgspec.json.Decoder[T], body: bytes, where: str = "") -> T:
    if not body:
        raise BadRequest("Empty request body")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refusal(error, decoder.type, where) from error
