"""What is known of messages of FIFO queues beside their partitions: deduplication ids, and those in flight.

Each statement here is a group commit: requests that come while it runs go together in the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from queen.broker.batcher import Batcher
from queen.storage.database import Database, Record

Lease = tuple[str, str]
"""A partition and the id of its lease."""

_MOST_ROWS: Final = 2000
_NONE: Final[Mapping[Hashable, Record]] = {}


@dataclass(slots=True, eq=False)
class _Rows:
    """The parameters of one request, column by column."""

    columns: Sequence[Sequence[Any]]
    answer: asyncio.Future[Mapping[Any, Record]]


class _BatchedStatement:
    """A statement whose parameters are columns of equal length, and whose rows say which of them they answer."""

    def __init__(self, database: Database, name: str, key: Callable[[Record], Hashable]) -> None:
        self._link = database.link()
        self._name = name
        self._key = key
        self._batcher: Batcher[_Rows] = Batcher(
            self._run, weigh=lambda request: len(request.columns[0]), limit=_MOST_ROWS
        )

    async def __call__(self, *columns: Sequence[Any]) -> Mapping[Any, Record]:
        """Rows by their keys; there may be others among them, of requests that ran at the same time."""
        if not columns[0]:
            return _NONE
        request = _Rows(columns, asyncio.get_running_loop().create_future())
        self._batcher.submit(request)
        return await request.answer

    async def _run(self, batch: list[_Rows]) -> None:
        columns: Sequence[Sequence[Any]] = batch[0].columns
        if len(batch) > 1:
            columns = [
                [value for column in same for value in column]
                for same in zip(*(request.columns for request in batch), strict=True)
            ]
        key = self._key
        rows = {key(row): row for row in await self._link.fetch(self._name, *columns)}
        for request in batch:
            if not request.answer.done():
                request.answer.set_result(rows)


class Deliveries:
    """Batched statements about deduplication ids and messages in flight, on the first shard."""

    def __init__(self, database: Database) -> None:
        def of_message(row: Record) -> Hashable:
            return str(row["message_id"])

        def of_delivery(row: Record) -> Hashable:
            return row["message_id"], row["lease_id"]

        def of_lease(row: Record) -> Hashable:
            return row["partition_id"], row["lease_id"]

        def statement(name: str, key: Callable[[Record], Hashable]) -> _BatchedStatement:
            return _BatchedStatement(database, name, key)

        self.deduplicate: Final = statement("sqs_deduplicate", lambda row: (row["queue_id"], row["key"]))
        """Queues, keys, transaction ids, partitions: what each key of a queue is pushed as."""
        self.received: Final = statement("sqs_received", of_message)
        """Queues, messages, partitions, leases, places, transaction ids, seconds: how often each was received."""
        self.mark_deleted: Final = statement("sqs_mark_deleted", of_delivery)
        """Messages, leases: those that are deleted."""
        self.consumable: Final = statement("sqs_consumable", of_lease)
        """Partitions, leases: up to which message each lease is deleted."""
        self.consumed: Final = statement("sqs_consumed", of_lease)
        """Partitions, leases, places: nothing is known of these messages any more."""
        self.change_visibility: Final = statement("sqs_change_visibility", of_delivery)
        """Messages, leases, seconds: those that were in flight."""
        self.lease_ends: Final = statement("sqs_lease_ends", of_lease)
        """Partitions, leases: in how many seconds each lease has to end."""


def columns_of(leases: Sequence[Lease]) -> tuple[list[str], list[str]]:
    return [partition for partition, _ in leases], [lease for _, lease in leases]
