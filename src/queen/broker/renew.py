"""Renewing leases: gathered like pushes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from queen.broker.fusion import Fusion
from queen.errors import NotFound, QueenError
from queen.storage.database import Database, Link
from queen.wire.ids import is_uuid, parse_lease


@dataclass(slots=True, eq=False)
class Renewal:
    lease_id: str
    seconds: float
    answer: asyncio.Future[datetime]


class Renewer:
    """Makes leases last longer, each with all the partitions it holds."""

    def __init__(self, database: Database) -> None:
        self._link: Link = database.link()
        self.fusion: Fusion[Renewal] = Fusion(self._run, _fail, limit=500)

    def renew(self, lease_id: str, seconds: float) -> asyncio.Future[datetime]:
        """The future gives the earliest time at which the lease now ends; `NotFound` when it is not live."""
        renewal = Renewal(lease_id, seconds, asyncio.get_running_loop().create_future())
        self.fusion.submit(renewal)
        return renewal.answer

    async def _run(self, batch: list[Renewal]) -> None:
        try:
            await self._renew(batch)
        except (asyncpg.PostgresError, QueenError) as error:
            for renewal in batch:
                _fail(renewal, error)

    async def _renew(self, batch: list[Renewal]) -> None:
        rows: list[tuple[int, Renewal]] = []
        for renewal in batch:
            place = parse_lease(renewal.lease_id) if is_uuid(renewal.lease_id) else None
            if place is None:
                continue
            partition_id, several = place
            held = [partition_id]
            if several:
                found = await self._link.fetch("lease_partitions", partition_id, renewal.lease_id)
                held = [row["partition_id"] for row in found]
            rows += [(id, renewal) for id in held]
        rows.sort(key=lambda row: row[0])
        ends: dict[int, datetime] = {}
        if rows:
            renewed = await self._link.fetch(
                "renew",
                [id for id, _ in rows],
                [renewal.lease_id for _, renewal in rows],
                [renewal.seconds for _, renewal in rows],
            )
            for row in renewed:
                key = id(rows[row["slot"] - 1][1])
                ends[key] = min(ends.get(key, row["lease_until"]), row["lease_until"])
        for renewal in batch:
            end = ends.get(id(renewal))
            if end is None:
                _fail(renewal, NotFound("Lease not found"))
            elif not renewal.answer.done():
                renewal.answer.set_result(end)


def _fail(renewal: Renewal, error: Exception) -> None:
    if not renewal.answer.done():
        renewal.answer.set_exception(error)
