"""Items of topics and dead letters as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

import msgspec

_NULL = msgspec.Raw(b"null")
_encode = msgspec.json.Encoder().encode


class Status(StrEnum):
    READY = "ready"
    LEASED = "leased"
    DEAD = "dead"


class Row(Protocol):
    """A row of the database: values by column."""

    def __getitem__(self, column: str, /) -> Any: ...


class _Item(msgspec.Struct):
    id: int | str
    namespace: str
    topic: str
    idempotency_key: str | None
    priority: int
    payload: bytes | msgspec.UnsetType
    data: msgspec.Raw | msgspec.UnsetType
    metadata: msgspec.Raw
    deliver_after: datetime
    status: Status
    retries: int
    created_at: datetime
    first_failed_at: datetime | None
    last_error: str | None
    updated_at: datetime | msgspec.UnsetType = msgspec.UNSET
    expires_at: datetime | msgspec.UnsetType | None = msgspec.UNSET
    lease_expires_at: datetime | msgspec.UnsetType | None = msgspec.UNSET
    lease_owner: str | msgspec.UnsetType | None = msgspec.UNSET
    original_id: int | str | msgspec.UnsetType = msgspec.UNSET
    moved_at: datetime | msgspec.UnsetType = msgspec.UNSET


def render_items(rows: Iterable[Row], namespace: str, topic: str, ids_as_text: bool) -> bytes:
    """A JSON array of items of one topic, leased or ready."""
    return _encode([_live_item(row, namespace, topic, ids_as_text) for row in rows])


def render_mixed_items(rows: Iterable[Row], namespace: str, topics: Mapping[int, str], ids_as_text: bool) -> bytes:
    """The same for items of several topics, whose names are given by their ids."""
    return _encode([_live_item(row, namespace, topics[row["topic_id"]], ids_as_text) for row in rows])


def render_dead_letters(rows: Iterable[Row], namespace: str, topic: str, ids_as_text: bool) -> bytes:
    """A JSON array of dead letters."""
    items = []
    for row in rows:
        item = _item(row, namespace, topic, Status.DEAD, ids_as_text)
        item.original_id = item.id
        item.moved_at = row["moved_at"]
        items.append(item)
    return _encode(items)


def render_ids(ids: Iterable[int], ids_as_text: bool) -> bytes:
    return _encode([str(id) for id in ids] if ids_as_text else list(ids))


def _live_item(row: Row, namespace: str, topic: str, ids_as_text: bool) -> _Item:
    until = row["leased_until"]
    item = _item(row, namespace, topic, Status.LEASED if until else Status.READY, ids_as_text)
    item.updated_at = row["updated_at"]
    item.expires_at = row["expires_at"]
    item.lease_expires_at = until
    item.lease_owner = row["lease_owner"] if until else None
    return item


def _item(row: Row, namespace: str, topic: str, status: Status, ids_as_text: bool) -> _Item:
    id, is_json, payload, metadata = row["id"], row["is_json"], row["payload"], row["metadata"]
    return _Item(
        str(id) if ids_as_text else id,
        namespace,
        topic,
        row["idempotency_key"],
        row["priority"],
        msgspec.UNSET if is_json else payload,
        msgspec.Raw(payload) if is_json else msgspec.UNSET,
        msgspec.Raw(metadata) if metadata else _NULL,
        row["deliver_after"],
        status,
        row["retries"],
        row["created_at"],
        row["first_failed_at"],
        row["last_error"],
    )
