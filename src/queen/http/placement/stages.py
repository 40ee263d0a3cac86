"""Staged publishing on several shards: what is staged goes to its shard, and each shard publishes what it has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from queen.http.placement.calls import Calls, Handlers, call, with_body
from queen.http.server.message import Request, Response, json_response
from queen.wire.push import PushItem
from queen.wire.shards import Name
from queen.wire.stages import AttemptRef, decode_publish, decode_stage

_raws = msgspec.json.Decoder(list[msgspec.Raw])


class StagePlacement:
    """Cuts requests up by shard. A writer is told where its messages are, and says so when they are to be published."""

    def __init__(self, calls: Calls) -> None:
        self._directory = calls.directory
        self._calls = calls

    async def stage(self, handlers: Handlers, request: Request) -> Response:
        body, items = decode_stage(request.body)
        messages: dict[int, list[PushItem]] = {}
        for item in body.items:
            messages.setdefault(await self._directory.find(Name.queue(item.queue)), []).append(item)
        raws: dict[int, list[msgspec.Raw]] = {}
        if items:
            for one, raw in zip(items, _raws.decode(body.topic_items), strict=True):
                shard = await self._directory.find(Name.topic(one.namespace, one.topic))
                raws.setdefault(shard, []).append(raw)
        shards = sorted(messages.keys() | raws.keys())
        head = {"run": body.run, "batch": body.batch, "attempt": body.attempt, "piece": body.piece}
        parts = [{**head, "items": messages.get(shard, []), "topicItems": raws.get(shard, [])} for shard in shards]
        answers = await self._ask(handlers, request, shards, parts)
        staged = [answer["staged"] for answer in answers]
        places = [{"shard": shard, "messages": count} for shard, count in zip(shards, staged, strict=True)]
        return json_response(201, {"staged": sum(staged), "shards": places})

    async def publish(self, handlers: Handlers, request: Request) -> Response:
        """One shard after the other: those that have done it are not asked in vain when the request comes again."""
        body = decode_publish(request.body)
        attempts: dict[int, list[AttemptRef]] = {}
        for ref in body.attempts:
            attempts.setdefault(ref.shard, []).append(ref)
        answers = []
        for shard in sorted(attempts) or [0]:
            refs = [{"attempt": ref.attempt, "messages": ref.messages} for ref in attempts.get(shard, [])]
            part = {"run": body.run, "batch": body.batch, "attempts": refs}
            answers += await self._ask(handlers, request, [shard % len(handlers)], [part])
        return json_response(
            200,
            {
                "messages": sum(answer["messages"] for answer in answers),
                "duplicates": sum(answer["duplicates"] for answer in answers),
                "repeated": all(answer["repeated"] for answer in answers),
            },
        )

    async def abandon(self, handlers: Handlers, request: Request) -> Response:
        answers = await self._calls.everyone(handlers, request)
        return json_response(200, {"removed": sum(_decode(answer)["removed"] for answer in answers)})

    async def _ask(
        self, handlers: Handlers, request: Request, shards: Sequence[int], parts: Sequence[Any]
    ) -> list[dict[str, Any]]:
        requests = [with_body(request, msgspec.json.encode(part)) for part in parts]
        answers = await asyncio.gather(
            *(call(handlers[shard], one) for shard, one in zip(shards, requests, strict=True))
        )
        return [_decode(answer) for answer in answers]


def _decode(response: Response) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(response.body)
    return decoded
