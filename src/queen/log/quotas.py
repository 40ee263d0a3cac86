"""Quotas: how many items a namespace may enqueue in any minute, counted over all workers, hosts and shards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from queen.errors import BadRequest, DatabaseUnavailable, QueenError, QuotaExceeded, RedisUnavailable
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
        self.find_home: Callable[[str], Awaitable[Quotas]] | None = None
        """With several shards: finds the quotas of the shard that keeps that of a namespace, and counts its items."""
        self._shared = shared
        self._database = database
        self._configured = dict(configured)
        self._meter = meter
        self._stored: dict[str, int] = {}
        self._ids: dict[str, int] = {}
        self._shares: dict[str, _Share] = {}
        self._asking: dict[str, asyncio.Lock] = {}
        self._loaded = False
        self._changes = 0

    async def admit(self, items: Sequence[EnqueueItem]) -> None:
        """Count items that this shard is about to store. Raises `QuotaExceeded`."""
        if self.find_home is None:
            await self.count(items)

    async def count(self, items: Sequence[EnqueueItem]) -> None:
        """Count items. Raises `QuotaExceeded` when a namespace is over its quota; then none of them counts."""
        if not self._loaded:
            await self.refresh()
        if not self._configured and not self._stored and self.find_home is None:
            return
        admitted: list[EnqueueItem] = []
        try:
            for namespace, some in _by_namespace(items).items():
                limit = await self.limit(namespace)
                if limit is not None:
                    await self._take(namespace, len(some), limit)
                    admitted += some
        except QueenError:
            self.give_back(admitted)
            raise

    def give_back(self, items: Sequence[EnqueueItem]) -> None:
        """Items were counted, and nothing of their request is stored: this worker may admit as many in their place."""
        for namespace, some in _by_namespace(items).items():
            share = self._shares.get(namespace)
            if share is not None:
                share.left += len(some)

    async def limit(self, namespace: str) -> int | None:
        """Items per minute; None: unlimited."""
        own = await self._own_limit(namespace)
        return own if own is not None else await self._own_limit(DEFAULT)

    async def used(self, namespace: str, stored: int) -> int | None:
        """Items counted in the last minute; None: unlimited. `stored` is what PostgreSQL says of that."""
        limit = await self.limit(namespace)
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
        changes = self._changes
        rows = await self._database.fetch("topic_quotas")
        self._stored = {row["name"]: row["quota_per_minute"] for row in rows}
        # A change that was notified meanwhile may not have been read.
        self._loaded = changes == self._changes

    def forget(self) -> None:
        """The quotas were changed: they are read again when next needed."""
        self._changes += 1
        self._loaded = False

    def all(self) -> dict[str, int]:
        """Every namespace with a quota of its own, stored or configured."""
        return dict(sorted((self._configured | self._stored).items()))

    async def _own_limit(self, namespace: str) -> int | None:
        home = self
        try:
            if self.find_home is not None:
                home = await self.find_home(namespace)
            if not home._loaded:
                await home.refresh()
        except DatabaseUnavailable as error:
            log.debug("namespace %s: its quota is as last known: %s", namespace, error)
        return home._stored.get(namespace, home._configured.get(namespace))

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


def _by_namespace(items: Sequence[EnqueueItem]) -> dict[str, list[EnqueueItem]]:
    found: dict[str, list[EnqueueItem]] = {}
    for item in items:
        found.setdefault(item.namespace, []).append(item)
    return found
