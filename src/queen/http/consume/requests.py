"""What a client sends over its WebSocket; docs/websocket.md explains each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from queen.errors import BadRequest
from queen.http.consume.options import MOST_BATCH
from queen.wire.ack import AckItem
from queen.wire.decode import refusal

RequestId: TypeAlias = str | int | None
Batch: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_BATCH)]
Partitions: TypeAlias = Annotated[int, Meta(ge=1, le=1000)]
Credit: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86_400 * 7)]
SubscriptionId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=255)]

_LONGEST_QUOTE: Final = 100


class _Request(msgspec.Struct, kw_only=True, rename="camel", forbid_unknown_fields=True, tag_field="type"):
    pass


class Subscribe(_Request, tag="subscribe"):
    """Deliver a queue's messages under this id from now on, as far as the credit goes."""

    id: SubscriptionId
    queue: str
    partition: str | None = None
    consumer_group: str | None = None
    batch: Batch | None = None
    partitions: Partitions = 1
    credit: Credit = 1
    auto_ack: bool = False
    subscription_mode: Literal["", "all", "new", "new-only", "now"] = ""
    subscription_from: str = ""
    conflation: bool | None = None


class AddCredit(_Request, tag="credit"):
    """So many more batches may be sent."""

    id: SubscriptionId
    credit: Credit


class Unsubscribe(_Request, tag="unsubscribe"):
    """Deliver no more; what was delivered can still be acked, unless it is to be released."""

    id: SubscriptionId
    release: bool = False


class _Acknowledging(_Request):
    id: RequestId = None
    acknowledgments: list[AckItem] | None = None
    transaction_id: str | None = None
    partition_id: str | None = None
    lease_id: str | None = None
    status: str | None = None
    error: str | None = None
    consumer_group: str | None = None
    subscription: SubscriptionId | None = None
    credit: Credit | None = None

    @property
    def is_batch(self) -> bool:
        return self.acknowledgments is not None

    def items(self) -> list[AckItem]:
        """One item for each message. Raises `BadRequest` when it is unclear which messages are meant."""
        if self.acknowledgments is None:
            return [self._single()]
        if self.transaction_id is not None or self.partition_id is not None:
            raise BadRequest("give either acknowledgments or the transactionId of one message, not both")
        status = self._status()
        if status or self.lease_id or self.error:
            # Fields outside of the array are the defaults of its messages.
            for item in self.acknowledgments:
                item.lease_id = item.lease_id or self.lease_id
                item.status = item.status or status
                item.error = item.error or self.error
        return self.acknowledgments

    def _single(self) -> AckItem:
        if not self.transaction_id:
            raise BadRequest("transactionId is required (or acknowledgments, for several messages)")
        if not self.partition_id:
            raise BadRequest("partitionId is required to ensure message uniqueness")
        return AckItem(self.transaction_id, self.partition_id, self.lease_id, self._status(), self.error)

    def _status(self) -> str | None:
        return self.status


class Acknowledge(_Acknowledging, tag="ack"):
    """Messages were processed, or as their status says."""


class Refuse(_Acknowledging, tag="nack"):
    """Messages could not be processed: the same as an ack with the status `failed`."""

    def _status(self) -> str | None:
        return self.status or "failed"


class Renew(_Request, tag="renew"):
    """A lease is to last longer."""

    lease_id: str
    id: RequestId = None
    seconds: Seconds = 60.0


class Ping(_Request, tag="ping"):
    """Is the server there? For browsers, which cannot send the pings of the protocol."""

    id: RequestId = None


Request: TypeAlias = Subscribe | AddCredit | Unsubscribe | Acknowledge | Refuse | Renew | Ping

_decoder: Final[msgspec.json.Decoder[Request]] = msgspec.json.Decoder(Request)
_any = msgspec.json.Decoder()
_KINDS: Final[Mapping[str, type[_Request]]] = {
    str(one.__struct_config__.tag): one for one in (Subscribe, AddCredit, Unsubscribe, Acknowledge, Refuse, Renew, Ping)
}
TYPES: Final[Sequence[str]] = tuple(_KINDS)


class InvalidMessage(BadRequest):
    """A message is no valid request; `id` and `kind` are what could be read of it."""

    def __init__(self, text: str, id: RequestId = None, kind: str | None = None) -> None:
        super().__init__(text)
        self.id = id
        self.kind = kind


def decode_request(text: bytes) -> Request:
    """The request in a message; raises `InvalidMessage` when there is none."""
    try:
        return _decoder.decode(text)
    except msgspec.ValidationError as error:
        raise _explain(text, error) from error
    except msgspec.DecodeError as error:
        raise InvalidMessage(f"Invalid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidMessage("Invalid JSON: nested too deeply") from error


def _explain(text: bytes, error: Exception) -> InvalidMessage:
    try:
        value = _any.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return InvalidMessage(f"Invalid JSON: {error}")
    if not isinstance(value, dict):
        return InvalidMessage("a message must be a JSON object with a type")
    id, kind = value.get("id"), value.get("type")
    if not isinstance(id, str | int) or isinstance(id, bool):
        id = None
    if not isinstance(kind, str) or kind not in _KINDS:
        quoted = repr(kind)[:_LONGEST_QUOTE]
        what = f"unknown type {quoted}" if "type" in value else "type is required"
        return InvalidMessage(f"{what}: it must be one of {', '.join(TYPES)}", id)
    return InvalidMessage(str(refusal(error, _KINDS[kind])), id, kind)
