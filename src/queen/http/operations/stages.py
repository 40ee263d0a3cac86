"""Descriptions of staged publishing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, field

from queen.http.openapi.operation import SEALED, Answer, Body, Count, Name, Operation, Uuid
from queen.http.operations.messaging import PushRequestItem
from queen.http.operations.topics import ItemToEnqueue
from queen.wire.stages import Piece, Shard, Whole

_TAG: Final = "Staging"
_BATCH: Final = {"run": "6f1b9a52-0d52-4c84-9d0c-6a2f5f0b7d11", "batch": 7}
_ATTEMPT: Final = "019ae0f0-7000-4000-8000-000000000001"


class BatchToAbandon(Body):
    """Who writes, and which batch."""

    run: Annotated[Name, Meta(description="A streaming query, or a single write: whatever its batches are counted by.")]
    batch: Whole


class StageRequest(BatchToAbandon):
    """A piece of what an attempt of a task writes: messages for queues (`items`), for topics, or both."""

    attempt: Uuid
    piece: Annotated[
        Piece, Meta(description="Numbers the pieces of an attempt; one that is sent again changes nothing.")
    ] = 0
    items: list[PushRequestItem] = field(default_factory=list)
    topic_items: Annotated[list[ItemToEnqueue], Meta(max_length=10_000)] = field(default_factory=list)


class StagedPlace(Answer):
    """How many messages of the piece are on one shard."""

    shard: Shard
    messages: Count


class Staged(Answer):
    """How many messages the piece held, and where they are."""

    staged: Count
    shards: list[StagedPlace]


class StagedAttempt(Body):
    """An attempt that succeeded, and how many messages it staged in all its pieces, on one shard."""

    attempt: Uuid
    messages: Whole
    shard: Shard = 0


class PublishRequest(BatchToAbandon):
    """Which attempts count, in the order in which their messages are to be stored."""

    attempts: list[StagedAttempt]


class PublishedBatch(Answer):
    """What the batch came to; `repeated`: it was published before, and nothing was done now."""

    messages: Count
    duplicates: Count
    repeated: bool


class AbandonedBatch(Answer):
    """How many messages were removed."""

    removed: Count


OPERATIONS: Final[Mapping[str, Operation]] = {
    "POST /api/v1/stages": Operation(
        id="stageMessages",
        summary="Stage messages of a batch",
        description="They are messages once the batch is published. What nobody publishes is removed after a day.",
        tag=_TAG,
        body=StageRequest,
        body_example={**_BATCH, "attempt": _ATTEMPT, "items": [{"queue": "totals", "payload": {"count": 3}}]},
        answers={201: Staged},
        errors=SEALED,
    ),
    "POST /api/v1/stages/publish": Operation(
        id="publishBatch",
        summary="Publish a batch, all or nothing, and once",
        description="A batch that is not after the last that the run published is answered `repeated` and changes "
        "nothing. Refused with 409 when staged messages are missing (write the batch again) or do not fit their queue.",
        tag=_TAG,
        body=PublishRequest,
        body_example={**_BATCH, "attempts": [{"attempt": _ATTEMPT, "messages": 1}]},
        answers={200: PublishedBatch},
        errors=(*SEALED, 429),
    ),
    "POST /api/v1/stages/abandon": Operation(
        id="abandonBatch",
        summary="Remove what was staged for a batch",
        tag=_TAG,
        body=BatchToAbandon,
        body_example=dict(_BATCH),
        answers={200: AbandonedBatch},
        errors=SEALED,
    ),
}
