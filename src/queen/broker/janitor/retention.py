"""Retention: messages of queues with `retentionEnabled` go when they are old enough."""

from __future__ import annotations

from queen.broker.janitor.election import Session
from queen.broker.janitor.rule import Kind, Rule, cuts_of
from queen.broker.janitor.trim import Trimmer

_CUTS = (
    (Rule.AGED, Kind.RETENTION, "retention_seconds"),
    (Rule.CONSUMED, Kind.COMPLETED_RETENTION, "completed_retention_seconds"),
)


class Retention:
    """`retentionSeconds` removes consumed or not, `completedRetentionSeconds` only what every group has consumed."""

    def __init__(self, trimmer: Trimmer) -> None:
        self._trimmer = trimmer

    async def run(self, session: Session) -> bool:
        return await self._trimmer.trim(session, cuts_of(await session.fetch("queues_with_retention"), _CUTS))
