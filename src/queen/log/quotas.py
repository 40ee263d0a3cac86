"""Quotas: how many items a namespace may enqueue in any minute, counted over all workers, hosts and shards."""

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
from queen.wire.topics.requests import EnqueueItem

log = logging.getLogger(__name__)

_CHUNKS_PER_MINUTE: Final = 200
_KEEP_SECONDS: Final = 10.0
DEFAULT: Final = "default"
"""The quota of this name is also that of every namespace without one of its own."""


@dataclass(slots=True)
class _Share:
    """The unused part of what this worker has reserved of a namespace's quota."""

    left: int = 0
    until: float = 0.0


class RefusalMeter(Protocol):
    """Counts items of topics."""

    def topic_items(self, event: str, namespace: str, topic: str, count: int) -> None: ...


class Quotas:
    """Admits items within their quotas. A worker reserves a little more than it needs, so that few requests do."""

    def __init__(
        self,
        database: Database,
        configured: Mapping[str, int],
        meter: RefusalMeter | None = None,
        shared: Counters | None = None,
    ) -> None:
        """`configured` are quotas by namespace; one that was set by `set` overrides it. `meter` counts refused items.

        `shared` counts for all workers and hosts; without it, and while it is unavailable, PostgreSQL does.
        """
        self.counted_elsewhere = False
        """With several shards each namespace is counted once, by `count` of the shard that keeps its quota."""
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
        """Count items that this shard is about to store. Raises `QuotaExceeded`."""
        if not self.counted_elsewhere:
            await self.count(items)

    async def count(self, items: Sequence[EnqueueItem]) -> None:
        """Count items. Raises `QuotaExceeded` when a namespace is over its quota; then none of them counts."""
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
        """Items per minute; None: unlimited."""
        for name in (namespace, DEFAULT):
            for quotas in (self._stored, self._configured):
                if name in quotas:
                    return quotas[name]
        return None

    async def used(self, namespace: str, stored: int) -> int | None:
        """Items counted in the last minute; None: unlimited. `stored` is what PostgreSQL says of that."""
        if not self._loaded:
            await self.refresh()
        limit = self.limit(namespace)
        if limit is None or self._shared is None:
            return None if limit is None else stored
        try:
            # Nothing more is counted, and what is left of the limit says how much is used.
            return max(0, limit - (await self._shared.add(f"quota:{namespace}", 0, limit)).left)
        except RedisUnavailable:
            return stored

    async def set(self, namespace: str, per_minute: int | None) -> None:
        """Set the quota of a namespace; None: as in the settings."""
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
        """Every namespace with a quota of its own, stored or configured."""
        return dict(sorted((self._configured | self._stored).items()))

    async def _take(self, namespace: str, count: int, limit: int) -> None:
        if count > limit > 0:
            raise BadRequest(
                f"namespace {namespace} may enqueue {limit} items per minute, this request has {count}: split it"
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
                        f"namespace {namespace} may enqueue {limit} items per minute; nothing was stored,"
                        f" retry in {wait} s",
                        wait,
                    )
                share.until = now + _KEEP_SECONDS
            share.left -= count

    async def _reserve(self, share: _Share, namespace: str, least: int, limit: int) -> int | None:
        """Add to the share; returns the seconds to wait when the quota is used up."""
        if limit == 0:
            return 60
        most = max(least, limit // _CHUNKS_PER_MINUTE)
        if self._shared is not None:
            try:
                return await self._reserve_shared(self._shared, share, namespace, least, most, limit)
            except RedisUnavailable:
                log.debug("namespace %s: quota counted in PostgreSQL, Redis is unavailable", namespace)
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
