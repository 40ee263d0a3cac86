"""Staged publishing: request bodies and responses."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias, TypeVar
from uuid import UUID

import msgspec

from queen.errors import BadRequest
from queen.wire.decode import refusal
from queen.wire.fields import Answer, Count
from queen.wire.push import NameText, PushItem, check_items, check_name, check_utf8
from queen.wire.shards import MOST_SHARDS
from queen.wire.topics.requests import EnqueueItem, decode_enqueue_items

LARGEST_BATCH: Final = (1 << 53) - 1
MOST_PIECES: Final = 1 << 31
Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_BATCH)]
Shard: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MOST_SHARDS)]
Piece: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MOST_PIECES)]

_NONE: Final = msgspec.Raw(b"[]")
T = TypeVar("T", bound="BatchRef")


class BatchRef(msgspec.Struct, forbid_unknown_fields=True):
    """The writer (a streaming query, or a single write), and the batch."""

    run: NameText
    batch: Whole


class StageBody(BatchRef):
    """A piece of what an attempt of a task writes: messages for queues, items for topics, or both."""

    attempt: UUID
    piece: Annotated[
        Piece, msgspec.Meta(description="Numbers the pieces of an attempt; one that is sent again changes nothing.")
    ] = 0
    items: list[PushItem] = msgspec.field(default_factory=list)
    topic_items: Annotated[
        msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "array", "items": {"type": "object"}})
    ] = msgspec.field(default_factory=lambda: _NONE, name="topicItems")


class AttemptRef(msgspec.Struct, forbid_unknown_fields=True):
    """An attempt that succeeded, and how many messages it staged, on which shard."""

    attempt: UUID
    messages: Whole
    shard: Shard = 0


class PublishBody(BatchRef):
    """The attempts that count, in the order in which their messages are to be stored."""

    attempts: list[AttemptRef]


_stage = msgspec.json.Decoder(StageBody)
_publish = msgspec.json.Decoder(PublishBody)
_ref = msgspec.json.Decoder(BatchRef)


def decode_stage(body: bytes) -> tuple[StageBody, list[EnqueueItem]]:
    """What is to be staged, each item of it valid. Raises `BadRequest` that says which is wrong, and how."""
    check_utf8(body)
    stage = _decode(_stage, body)
    check_items(stage.items)
    raw = bytes(stage.topic_items)
    items = decode_enqueue_items(raw, "topicItems") if raw not in (b"[]", b"null") else []
    if not stage.items and not items:
        raise BadRequest("items array is required (or topicItems, for topics)")
    return stage, items


def decode_publish(body: bytes) -> PublishBody:
    publish = _decode(_publish, body)
    if len({(ref.attempt, ref.shard) for ref in publish.attempts}) < len(publish.attempts):
        raise BadRequest("an attempt is named twice (at attempts)")
    return publish


def decode_batch_ref(body: bytes) -> BatchRef:
    return _decode(_ref, body)


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    if not body:
        raise BadRequest("Empty request body")
    try:
        decoded = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refusal(error, decoder.type) from error
    check_name(decoded.run, "Run", "run")
    return decoded


class StagedPlace(Answer):
    """How many messages of the piece are on one shard."""

    shard: Shard
    messages: Count


class Staged(Answer):
    """How many messages the piece held, and on which shards they are."""

    staged: Count
    shards: list[StagedPlace]


class PublishedBatch(Answer):
    """What the batch came to; `repeated`: it was published before, and nothing was done now."""

    messages: Count
    duplicates: Count
    repeated: bool


class AbandonedBatch(Answer):
    """How many messages were removed."""

    removed: Count
