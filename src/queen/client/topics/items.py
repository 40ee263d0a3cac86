"""Items of topics: types, encoding and decoding."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias, TypedDict

import msgspec

from queen.client.http import decode_as
from queen.client.push import TransactionIds


class TopicItem(TypedDict, total=False):
    """A dequeued item: `data`, or `payload` for bytes. Times are ISO 8601.

    Dead letters have `original_id` and `moved_at` instead of a lease.
    """

    id: int
    namespace: str
    topic: str
    data: Any
    payload: bytes
    metadata: dict[str, Any] | None
    priority: int
    idempotency_key: str | None
    deliver_after: str
    expires_at: str | None
    status: str
    retries: int
    created_at: str
    updated_at: str
    first_failed_at: str | None
    last_error: str | None
    lease_owner: str | None
    lease_expires_at: str | None
    original_id: int
    moved_at: str


class NackResponse(TypedDict):
    """Result of a nack: a dead letter, or ready again after `retry_in_seconds`."""

    dlq: bool
    retry_in_seconds: float


class TopicCounts(TypedDict):
    """Number of items of a topic by state, and its options."""

    namespace: str
    topic: str
    ready: int
    delayed: int
    leased: int
    dead: int
    options: dict[str, Any]


EnqueueItems: TypeAlias = Any
"""What to enqueue: a JSON value, bytes, or `{"data" or "payload": …, "priority"?: …}`; or a list of these."""

ItemRef: TypeAlias = TopicItem | Mapping[str, Any] | int
"""A dequeued item, or its id."""
ItemRefs: TypeAlias = ItemRef | Sequence[TopicItem] | Sequence[Mapping[str, Any]] | Sequence[int]

TopicHandler: TypeAlias = (
    Callable[[TopicItem], object]
    | Callable[[list[TopicItem]], object]
    | Callable[[dict[str, Any]], object]
    | Callable[[list[dict[str, Any]]], object]
)
"""A function or coroutine function of an item, or of a list of items."""

_FIELDS: Final = frozenset(
    {"data", "payload", "priority", "metadata", "deliver_after", "delay", "ttl", "idempotency_key"}
)

_items = msgspec.json.Decoder(list[dict[str, Any]])


def decode_items(body: bytes) -> list[TopicItem]:
    """Decode the items of a response."""
    items: list[Any] = decode_as(_items, body)
    for item in items:
        if "payload" in item:
            item["payload"] = base64.b64decode(item["payload"])
    return items


def wire_items(
    given: EnqueueItems, options: Mapping[str, Any], where: Mapping[str, str], ids: TransactionIds | None
) -> list[dict[str, Any]]:
    """Items in wire format; their own fields override the builder's `options`.

    With `ids`, items without an idempotency key get one, so that the request can be retried.
    """
    items = list(given) if isinstance(given, list | tuple) else [given]
    if len(items) > 1 and options.get("idempotency_key"):
        raise ValueError(
            "several items cannot share one idempotency key: give each its own, or enqueue them one by one"
        )
    return [_wire_item(item, index, options, where, ids) for index, item in enumerate(items)]


def _wire_item(
    given: Any, index: int, options: Mapping[str, Any], where: Mapping[str, str], ids: TransactionIds | None
) -> dict[str, Any]:
    if isinstance(given, bytes | bytearray | memoryview):
        fields: dict[str, Any] = {"payload": bytes(given)}
    elif isinstance(given, Mapping) and ("data" in given or "payload" in given):
        fields = dict(given)
    else:
        fields = {"data": given}
    unknown = sorted(fields.keys() - _FIELDS)
    if unknown:
        raise ValueError(f"item {index} has unknown fields ({', '.join(unknown)}): put them into data")
    if "payload" in fields and not isinstance(fields["payload"], bytes):
        raise TypeError(f"payload of item {index} must be bytes; use data for JSON values")
    item: dict[str, Any] = {**_without(options, fields), **fields, **where}
    checked_time(item.get("deliver_after"))
    if ids is not None and not item.get("idempotency_key"):
        item["idempotency_key"] = ids.next()
    return item


def checked_time(given: datetime | str | None) -> datetime | str | None:
    """The time, if it is unambiguous: a datetime needs a time zone."""
    if isinstance(given, datetime) and given.tzinfo is None:
        raise ValueError(
            f"deliver_after {given} has no time zone: use datetime.now(UTC), or .astimezone() for local time"
        )
    return given


def _without(options: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The builder's options without `delay` and `deliver_after` if the item has either: they exclude each other."""
    if "delay" in fields or "deliver_after" in fields:
        return {name: value for name, value in options.items() if name not in ("delay", "deliver_after")}
    return dict(options)
