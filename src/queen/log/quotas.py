"""Quotas: how many items a namespace may enqueue in any minute, counted over all workers and hosts."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from queen.errors import BadRequest, QuotaExceeded, RedisUnavailable
from queen.redis.interfaces import Counters
from queen.storage.database import Database
from queen.wire.topics import EnqueueItem

log = logging.getLogger(__name__)

_CHUNKS_PER_MINUTE: Final = 200
_KEEP_SECONDS: Final = 10.0


@dataclass(slots=True)
class _Share:
    """What this worker has reserved of a namespace's quota and not used."""

    left: int = 0
    until: float = 0.0


class RefusalMeter(Protocol):
    """Counts items of topics."""

    def topic_items(self, event: str, namespace: str, topic: str, count: int) -> None: ...


class Quotas:
    """Admits items within their quotas. A worker reserves a little more than it needs, so it seldom has to ask."""

    def __init__(
        self,
        database: Database,
        configured: Mapping[str, int],
        meter: RefusalMeter | None = None,
        shared: Counters | None = None,
    ) -> None:
        """`configured` are quotas by namespace; one that was set by `set` wins. `meter` counts refused items.

        `shared` counts for all workers and hosts; without, and whenever it is away, PostgreSQL does.
        """
        self._shared = shared
        self._database = database
        self._configured = dict(configured)
        self._meter = meter
        self._stored: dict[str, int] = {}
        self._ids: dict[str, int] = {}
        self._shares: dict[str, _Share] = {}
        self._asking: dict[str, asyncio.Lock] = {}
        self._loaded = False

    async def admit(self, items: Sequence[EnqueueItem]) -> None:
        """Count the items. Raises `QuotaExceeded` when one namespace is over its quota; then none of them counts."""
        if not self._loaded:
            await self.refresh()
        if not self._configured and not self._stored:
            return
        wanted = Counter(item.namespace for item in items)
        admitted: list[tuple[str, int]] = []
        try:
            for namespace, count in wanted.items():
                limit = self.limit(namespace)
                if limit is not None:
                    await self._take(namespace, count, limit)
                    admitted.append((namespace, count))
        except (QuotaExceeded, BadRequest):
            for namespace, count in admitted:
                self._shares[namespace].left += count
            raise

    def limit(self, namespace: str) -> int | None:
        """Items per minute; None: as many as it likes."""
        return self._stored.get(namespace, self._configured.get(namespace))

    async def set(self, namespace: str, per_minute: int | None) -> None:
        """Set the quota of a namespace, or (None) let the settings decide."""
        await self._database.fetch("topic_set_quota", namespace, per_minute)
        await self.refresh()

    async def refresh(self) -> None:
        """Read the quotas again."""
        rows = await self._database.fetch("topic_quotas")
        self._stored = {row["name"]: row["quota_per_minute"] for row in rows}
        self._loaded = True

    def forget(self) -> None:
        """The quotas were changed: they are read again when next needed."""
        self._loaded = False

    def all(self) -> dict[str, int]:
        """Every namespace that has a quota."""
        return dict(sorted((self._configured | self._stored).items()))

    async def _take(self, namespace: str, count: int, limit: int) -> None:
        if count > limit > 0:
            raise BadRequest(
                f"namespace {namespace} may enqueue {limit} items a minute, and this request has {count}: split it"
            )
        share = self._shares.setdefault(namespace, _Share())
        async with self._asking.setdefault(namespace, asyncio.Lock()):
            now = asyncio.get_running_loop().time()
            if now > share.until:
                share.left = 0
            if share.left < count:
                wait = await self._reserve(share, namespace, count - share.left, limit)
                if wait is not None:
                    if self._meter is not None:
                        self._meter.topic_items("refused", namespace, "", count)
                    raise QuotaExceeded(
                        f"namespace {namespace} may enqueue {limit} items a minute; nothing was stored,"
                        f" try again in {wait} s",
                        wait,
                    )
                share.until = now + _KEEP_SECONDS
            share.left -= count

    async def _reserve(self, share: _Share, namespace: str, least: int, limit: int) -> int | None:
        """Add to the share; returns the seconds to wait when that cannot be."""
        if limit == 0:
            return 60
        most = max(least, limit // _CHUNKS_PER_MINUTE)
        if self._shared is not None:
            try:
                return await self._reserve_shared(self._shared, share, namespace, least, most, limit)
            except RedisUnavailable:
                log.debug("the quota of %s is counted in PostgreSQL, as Redis is away", namespace)
        id = await self._namespace_id(namespace)
        async with self._database.transaction() as transaction:
            await transaction.fetch("topic_hold_namespace", id)
            (row,) = await transaction.fetch("topic_reserve_quota", id, least, most, limit)
        if not row["granted"]:
            return max(1, int(row["wait"]))
        share.left += row["granted"]
        return None

    async def _reserve_shared(
        self, counters: Counters, share: _Share, namespace: str, least: int, most: int, limit: int
    ) -> int | None:
        for count in sorted({most, least}, reverse=True):
            counted = await counters.add(f"quota:{namespace}", count, limit)
            if counted.admitted:
                share.left += count
                return None
        return counted.wait

    async def _namespace_id(self, namespace: str) -> int:
        id = self._ids.get(namespace)
        if id is None:
            await self._database.fetch("topic_create_namespaces", [namespace])
            (row,) = await self._database.fetch("topic_namespaces_by_names", [namespace])
            id = self._ids[namespace] = row["id"]
        return id
