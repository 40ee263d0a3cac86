"""Eviction: messages that have waited too long, or outlived their time, are not delivered any more."""

from __future__ import annotations

from queen.broker.janitor.election import Session
from queen.broker.janitor.rule import Kind, Rule, cuts_of
from queen.broker.janitor.trim import Trimmer

_CUTS = (
    (Rule.AGED, Kind.TTL, "ttl"),
    (Rule.WAITING, Kind.MAX_WAIT, "max_wait_time_seconds"),
)


class Eviction:
    """`ttl` ends every message at an age; `maxWaitTimeSeconds` ends what some group has not consumed by then.

    A partition is cut at one place, so what everybody has consumed before an evicted message goes with it.
    """

    def __init__(self, trimmer: Trimmer) -> None:
        self._trimmer = trimmer

    async def run(self, session: Session) -> bool:
        return await self._trimmer.trim(session, cuts_of(await session.fetch("queues_with_eviction"), _CUTS))
