"""Releasing leases whose holder is gone: gathered like pushes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from queen.broker.fusion import Fusion
from queen.broker.leases import LeaseBook
from queen.broker.whole_acks import OnFreed
from queen.errors import QueenError
from queen.storage.database import Database, Link


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease and every partition it was given out for."""

    lease_id: str
    partition_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Release:
    leases: Sequence[HeldLease]
    answer: asyncio.Future[int]


class Releaser:
    """Ends leases early. What they hold goes to the next consumer as it would have when they ran out, only sooner."""

    def __init__(self, database: Database, leases: LeaseBook, on_freed: OnFreed) -> None:
        self._link: Link = database.link()
        self._leases = leases
        self._on_freed = on_freed
        self.fusion: Fusion[_Release] = Fusion(self._run, _fail, weigh=lambda release: len(release.leases), limit=1000)

    def release(self, leases: Sequence[HeldLease]) -> asyncio.Future[int]:
        """The future gives how many partitions came free; those whose lease had ended before are none of them."""
        release = _Release(leases, asyncio.get_running_loop().create_future())
        self.fusion.submit(release)
        return release.answer

    async def _run(self, batch: list[_Release]) -> None:
        # Cursors are always locked in this order, so two workers cannot wait for each other.
        rows = sorted(
            (partition_id, lease.lease_id)
            for release in batch
            for lease in release.leases
            for partition_id in lease.partition_ids
        )
        try:
            released = await self._link.fetch(
                "release_leases", [partition_id for partition_id, _ in rows], [lease_id for _, lease_id in rows]
            )
        except (asyncpg.PostgresError, QueenError) as error:
            for release in batch:
                _fail(release, error)
            return
        for row in released:
            self._leases.finish(row["lease_id"], row["partition_id"])
        self._on_freed([(row["queue_id"], row["partition_id"], row["group_id"], row["available"]) for row in released])
        freed = {(row["partition_id"], row["lease_id"]) for row in released}
        for release in batch:
            if not release.answer.done():
                release.answer.set_result(
                    sum((id, lease.lease_id) in freed for lease in release.leases for id in lease.partition_ids)
                )


def _fail(release: _Release, error: Exception) -> None:
    if not release.answer.done():
        release.answer.set_exception(error)
