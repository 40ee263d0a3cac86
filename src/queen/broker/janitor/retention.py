"""Retention: messages of queues with `retentionEnabled` go when they are old enough."""

from __future__ import annotations

from queen.broker.janitor.election import Session
from queen.broker.janitor.trim import Kind, Rule, Trimmer


class Retention:
    """`retentionSeconds` removes consumed or not, `completedRetentionSeconds` only what every group has consumed."""

    def __init__(self, batch: int) -> None:
        self._trimmer = Trimmer(batch)

    async def run(self, session: Session) -> bool:
        more = False
        for queue in await session.fetch("queues_with_retention"):
            for rule, kind, seconds in (
                (Rule.AGED, Kind.RETENTION, queue["retention_seconds"]),
                (Rule.CONSUMED, Kind.COMPLETED_RETENTION, queue["completed_retention_seconds"]),
            ):
                if seconds > 0:
                    more |= await self._trimmer.trim(session, rule, kind, queue["id"], queue["name"], seconds)
        return more
