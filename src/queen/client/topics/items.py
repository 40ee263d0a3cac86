"""Items of topics, as they come and as they go."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias, TypedDict

import msgspec

from queen.client.http import decode_as
from queen.client.push import TransactionIds


class TopicItem(TypedDict, total=False):
    """An item as handlers and `dequeue()` get it: `data`, or `payload` where bytes were enqueued. Times are ISO 8601.

    Dead letters have no lease, but `original_id` and `moved_at`.
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
    """What became of an item that failed: a dead letter, or ready again after so many seconds."""

    dlq: bool
    retry_in_seconds: float


class TopicCounts(TypedDict):
    """How many items a topic has, and its options."""

    namespace: str
    topic: str
    ready: int
    delayed: int
    leased: int
    dead: int
    options: dict[str, Any]


Enqueued: TypeAlias = Any
"""What is enqueued: any JSON value, bytes, or `{"data" or "payload": …, "priority"?: …}`; a list holds several."""

GivenItem: TypeAlias = TopicItem | Mapping[str, Any] | int
"""An item that was dequeued, or the id of one."""
GivenItems: TypeAlias = GivenItem | Sequence[TopicItem] | Sequence[Mapping[str, Any]] | Sequence[int]

TopicHandler: TypeAlias = (
    Callable[[TopicItem], object]
    | Callable[[list[TopicItem]], object]
    | Callable[[dict[str, Any]], object]
    | Callable[[list[dict[str, Any]]], object]
)
"""A function of an item, or of a list of them; what it returns is awaited where that can be done."""

_FIELDS: Final = frozenset(
    {"data", "payload", "priority", "metadata", "deliver_after", "delay", "ttl", "idempotency_key"}
)

_items = msgspec.json.Decoder(list[dict[str, Any]])


def decode_items(body: bytes) -> list[TopicItem]:
    """The items of an answer."""
    items: list[Any] = decode_as(_items, body)
    for item in items:
        if "payload" in item:
            item["payload"] = base64.b64decode(item["payload"])
    return items


def wire_items(
    given: Enqueued, said: Mapping[str, Any], where: Mapping[str, str], ids: TransactionIds | None
) -> list[dict[str, Any]]:
    """What is enqueued, as the server takes it: fields of an item win over what was `said` for all.

    With `ids`, those that have no key get one of their own, so that the request can be repeated without harm.
    """
    items = list(given) if isinstance(given, list | tuple) else [given]
    if len(items) > 1 and said.get("idempotency_key"):
        raise ValueError("several items cannot have one idempotency key: give each its own, or enqueue them singly")
    return [_wire_item(item, index, said, where, ids) for index, item in enumerate(items)]


def _wire_item(
    given: Any, index: int, said: Mapping[str, Any], where: Mapping[str, str], ids: TransactionIds | None
) -> dict[str, Any]:
    if isinstance(given, bytes | bytearray | memoryview):
        fields: dict[str, Any] = {"payload": bytes(given)}
    elif isinstance(given, Mapping) and ("data" in given or "payload" in given):
        fields = dict(given)
    else:
        fields = {"data": given}
    unknown = sorted(fields.keys() - _FIELDS)
    if unknown:
        raise ValueError(f"item {index} has fields that items do not have ({', '.join(unknown)}): put them into data")
    if "payload" in fields and not isinstance(fields["payload"], bytes):
        raise TypeError(f"payload of item {index} has to be bytes; anything that JSON can say goes into data")
    item: dict[str, Any] = {**_without(said, fields), **fields, **where}
    checked_time(item.get("deliver_after"))
    if ids is not None and not item.get("idempotency_key"):
        item["idempotency_key"] = ids.next()
    return item


def checked_time(given: datetime | str | None) -> datetime | str | None:
    """A time that everybody understands alike."""
    if isinstance(given, datetime) and given.tzinfo is None:
        raise ValueError(f"deliver_after {given} has no time zone: datetime.now(UTC), or .astimezone() for local time")
    return given


def _without(said: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """`deliver_after` and `delay` say the same thing: that of an item replaces either of the sentence."""
    if "delay" in fields or "deliver_after" in fields:
        return {name: value for name, value in said.items() if name not in ("delay", "deliver_after")}
    return dict(said)
