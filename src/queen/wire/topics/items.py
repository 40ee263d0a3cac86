"""Items of topics and dead letters as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, Protocol

import msgspec

_NULL = msgspec.Raw(b"null")
_BEFORE = b'{"id":0'
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
    metadata: msgspec.Raw | msgspec.UnsetType
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


class _Lease(msgspec.Struct):
    updated_at: datetime | None
    lease_expires_at: datetime | None
    lease_owner: str | None


def render_items(rows: Sequence[Row], namespace: str, topic: str, ids_as_text: bool) -> bytes:
    """A JSON array of items of one topic; all of them, or none, from a prefetch buffer."""
    if rows and isinstance(rows[0], ReadyItem):
        return _render_ready((row for row in rows if isinstance(row, ReadyItem)), ids_as_text)
    return _encode([_live_item(row, namespace, topic, ids_as_text) for row in rows])


def render_mixed_items(rows: Iterable[Row], namespace: str, topics: Mapping[int, str], ids_as_text: bool) -> bytes:
    """A JSON array of items of several topics, with the topics' names by id."""
    return _encode([_live_item(row, namespace, topics[row["topic_id"]], ids_as_text) for row in rows])


def render_ahead(row: Row, namespace: str, topic: str) -> tuple[bytes, bool]:
    """A prefetched item as JSON without its id and lease, and whether its payload and metadata are included."""
    item = _item(row, namespace, topic, Status.LEASED, False)
    item.id = 0
    item.expires_at = row["expires_at"]
    whole = row["payload"] is not None
    if not whole:
        item.metadata = msgspec.UNSET
    return _encode(item)[len(_BEFORE) : -1], whole


def add_payload(item: ReadyItem, payload: bytes, is_json: bool, metadata: bytes | None) -> None:
    """Add what of an item stayed in PostgreSQL."""
    body = b'"data":' + payload if is_json else b'"payload":' + _encode(payload)
    item.rendered += b',"metadata":%b,%b' % (metadata or b"null", body)
    item.whole = True


def _render_ready(items: Iterable[ReadyItem], ids_as_text: bool) -> bytes:
    """Items that were handed out together, with the same lease."""
    pieces = []
    lease = b""
    for item in items:
        if not lease:
            lease = b"," + _encode(_Lease(item.updated_at, item.leased_until, item.lease_owner))[1:]
        pieces.append((b'{"id":"%d"%s%s' if ids_as_text else b'{"id":%d%s%s') % (item.id, item.rendered, lease))
    return b"[%s]" % b",".join(pieces)


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
        msgspec.UNSET if is_json or payload is None else payload,
        msgspec.Raw(payload) if is_json and payload is not None else msgspec.UNSET,
        msgspec.Raw(metadata) if metadata else _NULL,
        row["deliver_after"],
        status,
        row["retries"],
        row["created_at"],
        row["first_failed_at"],
        row["last_error"],
    )


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class ReadyItem(msgspec.Struct, array_like=True):
    """`due` and `expires` are microseconds since 1970; `rendered` is the item as JSON between its id and its lease.

    A large payload is not included, and neither is its metadata (`whole` is false then): they are read from PostgreSQL.
    `nbytes` is what they have there.
    """

    id: int
    topic_id: int
    priority: int
    due: int
    expires: int | None
    whole: bool
    rendered: bytes
    lease_owner: str | None = None
    leased_until: datetime | None = None
    updated_at: datetime | None = None
    nbytes: int = 0

    def __getitem__(self, column: str) -> Any:
        return getattr(self, column)

    @property
    def size(self) -> int:
        """What it takes when it is handed out."""
        return len(self.rendered) + (0 if self.whole else self.nbytes) + 400

    @property
    def place(self) -> tuple[int, int, int]:
        """The position in the order of service."""
        return self.priority, self.due, self.id


def to_micros(moment: datetime) -> int:
    return (moment - _EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)
