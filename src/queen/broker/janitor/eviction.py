"""Eviction: messages that have waited too long, or outlived their time, are not delivered any more."""

from __future__ import annotations

from queen.broker.janitor.election import Session
from queen.broker.janitor.trim import Kind, Rule, Trimmer


class Eviction:
    """`ttl` ends every message at an age; `maxWaitTimeSeconds` ends what some group has not consumed by then.

    A partition is cut at one place, so what everybody has consumed before an evicted message goes with it.
    """

    def __init__(self, batch: int) -> None:
        self._trimmer = Trimmer(batch)

    async def run(self, session: Session) -> bool:
        more = False
        for queue in await session.fetch("queues_with_eviction"):
            for rule, kind, seconds in (
                (Rule.AGED, Kind.TTL, queue["ttl"]),
                (Rule.WAITING, Kind.MAX_WAIT, queue["max_wait_time_seconds"]),
            ):
                if seconds > 0:
                    more |= await self._trimmer.trim(session, rule, kind, queue["id"], queue["name"], seconds)
        return more
