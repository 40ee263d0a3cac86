"""Staged publishing: what a batch of tasks writes becomes messages all at once, and once."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from queen.http.auth import names
from queen.http.routing.call import Call
from queen.http.routing.context import Shard
from queen.http.routing.placement import Custom, Everywhere, Invoke, summed
from queen.http.routing.route import SEALED, RouteTable
from queen.http.server.message import Access
from queen.log.stager import Stager
from queen.log.stages import Attempt
from queen.wire.api.messages.stages import (
    AbandonedBatch,
    AttemptRef,
    BatchRef,
    PublishBody,
    PublishedBatch,
    StageBody,
    Staged,
    StagedPlace,
    decode_batch_ref,
    decode_publish,
    decode_stage,
)
from queen.wire.push import PushItem
from queen.wire.shards import Name
from queen.wire.topics.requests import EnqueueItem

routes = RouteTable("Staging")

_ROWS_PER_PIECE: Final = 1 << 24
_BATCH: Final = {"run": "6f1b9a52-0d52-4c84-9d0c-6a2f5f0b7d11", "batch": 7}
_ATTEMPT: Final = "019ae0f0-7000-4000-8000-000000000001"

_raws = msgspec.json.Decoder(list[msgspec.Raw])


class Piece(NamedTuple):
    """A piece of what an attempt writes, and its items for topics."""

    body: StageBody
    topic_items: list[EnqueueItem]


def _decode_piece(body: bytes) -> Piece:
    return Piece(*decode_stage(body))


async def _place_piece(shards: Any, invoke: Invoke, call: Call[None, Piece]) -> Staged:
    """Every message is staged on its shard; the response names it, and the writer names it to publish."""
    body, items = call.body
    find = shards.directory.find
    messages: dict[int, list[PushItem]] = {}
    for item in body.items:
        messages.setdefault(await find(Name.queue(item.queue)), []).append(item)
    raws: dict[int, list[msgspec.Raw]] = {}
    topic_items: dict[int, list[EnqueueItem]] = {}
    for one, raw in zip(items, _raws.decode(body.topic_items) if items else [], strict=True):
        shard = await find(Name.topic(one.namespace, one.topic))
        raws.setdefault(shard, []).append(raw)
        topic_items.setdefault(shard, []).append(one)
    places = []
    for shard in sorted(messages.keys() | raws.keys()):
        some = msgspec.structs.replace(
            body,
            items=messages.get(shard, []),
            topic_items=msgspec.Raw(msgspec.json.encode(raws.get(shard, []))),
        )
        staged = await invoke(shard, Call(call.request, None, Piece(some, topic_items.get(shard, []))))
        places.append(StagedPlace(shard, staged.staged))
    return Staged(sum(place.messages for place in places), places)


async def _place_publish(shards: Any, invoke: Invoke, call: Call[None, PublishBody]) -> PublishedBatch:
    """One shard after the other: those that have published are not repeated when the request comes again."""
    attempts: dict[int, list[AttemptRef]] = {}
    for ref in call.body.attempts:
        attempts.setdefault(ref.shard, []).append(ref)
    answers = []
    for shard in sorted(attempts) or [0]:
        some = msgspec.structs.replace(call.body, attempts=attempts.get(shard, []))
        answers.append(await invoke(shard % shards.directory.count, Call(call.request, None, some)))
    merged: PublishedBatch = summed(answers)
    return merged


@routes.on_shard(
    "POST",
    "/api/v1/stages",
    access=Access.READ_WRITE,
    names=names.staged,
    of_groups=False,
    placement=Custom(_place_piece),
    id="stageMessages",
    summary="Stage messages of a batch",
    description="They become messages when the batch is published. What is never published is removed after a day.",
    body=StageBody,
    decode=_decode_piece,
    body_example={**_BATCH, "attempt": _ATTEMPT, "items": [{"queue": "totals", "payload": {"count": 3}}]},
    returns={201: Staged},
    errors=SEALED,
)
async def stage(shard: Shard, call: Call[None, Piece]) -> Staged:
    body, items = call.body
    first, subject = body.piece * _ROWS_PER_PIECE, call.request.subject
    stager = Stager(shard.broker.stages, body.run, body.batch, body.attempt, first, subject)
    if body.items:
        await stager.add(body.items)
    if items:
        await stager.add_topic_items(bytes(body.topic_items), len(items))
    attempt = await stager.finish()
    return Staged(attempt.messages, [StagedPlace(0, attempt.messages)])


@routes.on_shard(
    "POST",
    "/api/v1/stages/publish",
    access=Access.READ_WRITE,
    names=names.published,
    of_groups=False,
    placement=Custom(_place_publish),
    id="publishBatch",
    summary="Publish a batch, all or nothing, and once",
    description="A batch that is not after the last that the run published is answered `repeated` and changes nothing. "
    "Refused with 409 when staged messages are missing (write the batch again) or do not fit their queue.",
    body=PublishBody,
    decode=decode_publish,
    body_example={**_BATCH, "attempts": [{"attempt": _ATTEMPT, "messages": 1}]},
    returns={200: PublishedBatch},
    errors=(*SEALED, 429),
)
async def publish(shard: Shard, call: Call[None, PublishBody]) -> PublishedBatch:
    body = call.body
    attempts = [Attempt(ref.attempt, ref.messages) for ref in body.attempts]
    published = await shard.broker.stages.publish(body.run, body.batch, attempts)
    return PublishedBatch(published.messages, published.duplicates, published.repeated)


@routes.on_shard(
    "POST",
    "/api/v1/stages/abandon",
    access=Access.READ_WRITE,
    names=names.abandoned,
    of_groups=False,
    placement=Everywhere(summed, required=True),
    id="abandonBatch",
    summary="Remove what was staged for a batch",
    body=BatchRef,
    decode=decode_batch_ref,
    body_example=dict(_BATCH),
    returns={200: AbandonedBatch},
    errors=SEALED,
)
async def abandon(shard: Shard, call: Call[None, BatchRef]) -> AbandonedBatch:
    return AbandonedBatch(await shard.broker.stages.abandon(call.body.run, call.body.batch))
