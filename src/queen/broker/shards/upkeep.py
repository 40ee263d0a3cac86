"""Background jobs of installations with several shards."""

from __future__ import annotations

from typing import Final

from queen.broker.janitor.election import Session
from queen.broker.janitor.job import Job
from queen.settings import Settings

_UPKEEP_SECONDS: Final = 300.0
# A key is kept as long as its item, and the window after that.
_LONGER_SECONDS: Final = 7 * 86_400.0


def shard_jobs(settings: Settings) -> list[Job]:
    """Claims of idempotency keys go a week after the keys themselves may."""
    keep, batch = settings.dedup_window_seconds + _LONGER_SECONDS, settings.eviction_batch_size

    async def forget_claims(session: Session) -> bool:
        return len(await session.fetch("forget_topic_key_claims", keep, batch)) == batch

    return [Job("topic key claims", _UPKEEP_SECONDS, forget_claims)]
