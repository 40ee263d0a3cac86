"""Staged publishing: what a batch of tasks writes becomes messages all at once, and once."""

from __future__ import annotations

from queen.broker.broker import Broker
from queen.broker.transactions.stager import Stager
from queen.broker.transactions.stages import Attempt
from queen.http.server.message import Request, Response, json_response
from queen.http.server.router import Access, Router
from queen.wire.stages import decode_batch_ref, decode_publish, decode_stage

_ROWS_PER_PIECE = 1 << 24


class StageRoutes:
    """What writers call that do not reach PostgreSQL themselves."""

    def __init__(self, broker: Broker) -> None:
        self._stages = broker.stages

    def add_to(self, router: Router) -> None:
        router.add("POST", "/api/v1/stages", self.stage, Access.READ_WRITE)
        router.add("POST", "/api/v1/stages/publish", self.publish, Access.READ_WRITE)
        router.add("POST", "/api/v1/stages/abandon", self.abandon, Access.READ_WRITE)

    async def stage(self, request: Request) -> Response:
        body, items = decode_stage(request.body)
        stager = Stager(self._stages, body.run, body.batch, body.attempt, body.piece * _ROWS_PER_PIECE)
        if body.items:
            await stager.add(body.items)
        if items:
            await stager.add_topic_items(bytes(body.topic_items), len(items))
        attempt = await stager.finish()
        places = [{"shard": 0, "messages": attempt.messages}]
        return json_response(201, {"staged": attempt.messages, "shards": places})

    async def publish(self, request: Request) -> Response:
        body = decode_publish(request.body)
        attempts = [Attempt(ref.attempt, ref.messages) for ref in body.attempts]
        published = await self._stages.publish(body.run, body.batch, attempts)
        answer = {
            "messages": published.messages,
            "duplicates": published.duplicates,
            "repeated": published.repeated,
        }
        return json_response(200, answer)

    async def abandon(self, request: Request) -> Response:
        body = decode_batch_ref(request.body)
        return json_response(200, {"removed": await self._stages.abandon(body.run, body.batch)})
