"""Background jobs of topics: expired items, old keys, stale prefetch buffers, remains of deleted topics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from queen.broker.maintenance.election import Job, Session
from queen.log.topics import lock_keys
from queen.settings import Settings

_STEPS_PER_RUN: Final = 20
_EXPIRY_SECONDS: Final = 5.0
_UPKEEP_SECONDS: Final = 60.0
_SETTLED_SECONDS: Final = 3.0
_BEGINNING: Final = datetime(1970, 1, 1, tzinfo=UTC)


def topic_jobs(settings: Settings) -> list[Job]:
    """The jobs of topics, run by the elected worker."""
    batch = settings.eviction_batch_size
    return [
        Job("topic expiry", _EXPIRY_SECONDS, ExpiredItems(batch).run),
        Job("topic keys", _UPKEEP_SECONDS, OldKeys(batch, settings.dedup_window_seconds).run),
        Job("topic usage", _UPKEEP_SECONDS, forget_usage),
        Job("topic ready items", _UPKEEP_SECONDS, free_prefetched),
        Job("retired logs", _UPKEEP_SECONDS, forget_retired),
        Job("dropped topics", _UPKEEP_SECONDS, DroppedTopics(batch).run),
    ]


class ExpiredItems:
    """Removes items past their `ttl`."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    async def run(self, session: Session) -> bool:
        return len(await session.fetch("topic_expire_items", self._batch)) == self._batch


class OldKeys:
    """Removes idempotency keys older than `window` seconds whose items are gone."""

    def __init__(self, batch: int, window: int) -> None:
        self._batch = batch
        self._window = float(window)
        self._since = _BEGINNING

    async def run(self, session: Session) -> bool:
        for _ in range(_STEPS_PER_RUN):
            (row,) = await session.fetch("topic_forget_keys", self._window, self._since, self._batch)
            if row["looked_at"] < self._batch or row["last"] <= self._since:
                # From the beginning next time: items of keys that were kept may be gone by then.
                self._since = _BEGINNING
                return False
            self._since = row["last"]
        return True


async def forget_usage(session: Session) -> bool:
    await session.fetch("topic_forget_usage")
    return False


async def free_prefetched(session: Session) -> bool:
    """Free items in prefetch buffers that no server uses, as after a crash or when they were turned off."""
    await session.fetch("topic_settle_handouts", _SETTLED_SECONDS, None, None)
    for row in await session.fetch("topic_ready_expired"):
        await session.fetch("topic_ready_close", row["topic_id"], row["token"], 0.0)
        # Nothing more is handed out of it: while there are handouts, its other items would stay leased.
        await session.fetch("topic_settle_handouts", 0.0, [row["topic_id"]], None)
    for row in await session.fetch("topic_ready_orphans"):
        await session.fetch("topic_ready_free", lock_keys([row["topic_id"]]), row["topic_id"])
    return False


async def forget_retired(session: Session) -> bool:
    await session.fetch("spool_forget_retired")
    return False


class DroppedTopics:
    """Removes items that were enqueued while their topic was being deleted."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    async def run(self, session: Session) -> bool:
        for row in await session.fetch("topic_dropped"):
            for statement in ("topic_remove_items", "topic_remove_leased_items"):
                while len(await session.fetch(statement, row["topic_id"], self._batch)) == self._batch:
                    pass
            if row["settled"]:
                await session.fetch("topic_forget_dropped", row["topic_id"])
        return False
