"""Items of topics for a consumer: leases that are kept, acks, nacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from datetime import datetime
from typing import Any

from queen.client.acks import AckResult
from queen.client.errors import QueenError
from queen.client.log import ClientLog
from queen.client.topics.calls import TopicCalls, TopicSource, refs_of
from queen.client.topics.items import TopicItem

_SHORTEST_PAUSE = 0.05


class TopicDeliveries:
    """What a consumer of topics fetches and settles."""

    def __init__(
        self, calls: TopicCalls, source: TopicSource, lease: float | None, wait: bool, renew: bool, log: ClientLog
    ) -> None:
        self._calls = calls
        self._source = source
        self._lease = lease
        self._wait = wait
        self._renew = renew
        self._log = log

    async def fetch(self, batch: int, timeout_millis: int) -> list[TopicItem]:
        return await self._calls.dequeue(
            self._source, batch, timeout_millis if self._wait else None, self._lease, attempts=1
        )

    async def settle(self, delivered: Sequence[TopicItem], error: str | None) -> list[AckResult]:
        refs = refs_of(delivered, self._source)
        if error is None:
            return [*await self._calls.settle("ack", refs, attempts=1)]
        return [*await self._calls.settle("nack", [{**ref, "error": error} for ref in refs], attempts=1)]

    async def give_back(self, delivered: Sequence[TopicItem]) -> None:
        await self._calls.settle("release", refs_of(delivered, self._source), attempts=1)

    def keeping(self, delivered: Sequence[TopicItem]) -> AbstractAsyncContextManager[None]:
        return self._keeping(delivered) if self._renew else nullcontext()

    def lane(self, delivered: TopicItem) -> str | None:
        return None

    async def close(self) -> None:
        return None

    @asynccontextmanager
    async def _keeping(self, delivered: Sequence[TopicItem]) -> AsyncIterator[None]:
        task = asyncio.create_task(self._extend(delivered))
        try:
            yield
        finally:
            task.cancel()

    async def _extend(self, delivered: Sequence[TopicItem]) -> None:
        """Three times in a lease, so that one extension may fail and the next still comes in time."""
        refs = refs_of(delivered, self._source)
        pause = max(_SHORTEST_PAUSE, min(map(lease_seconds, delivered)) / 3)
        while refs:
            await asyncio.sleep(pause)
            try:
                results = await self._calls.settle("extend", [self._extension(ref) for ref in refs])
            except QueenError as error:
                self._log.warning("Consumer.renew", f"the leases of {len(refs)} items were not extended: {error}")
                continue
            kept = [ref for ref, result in zip(refs, results, strict=True) if result.success]
            if len(kept) < len(refs):
                # Some may be settled by now; for a lease that is lost, the ack that will be refused is what counts.
                self._log.info("Consumer.renew", settled_or_lost=len(refs) - len(kept))
            refs = kept

    def _extension(self, ref: dict[str, Any]) -> dict[str, Any]:
        return ref if self._lease is None else {**ref, "seconds": self._lease}


def lease_seconds(item: TopicItem) -> float:
    """How long an item was leased for, by the clock of the server."""
    until, since = item["lease_expires_at"], item["updated_at"]
    assert until is not None
    return (datetime.fromisoformat(until) - datetime.fromisoformat(since)).total_seconds()
