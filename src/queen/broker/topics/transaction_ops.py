"""Operations on topics inside a transaction: acks and enqueues."""

from __future__ import annotations

from collections.abc import Sequence

from queen.broker.topics.enqueue import Enqueuer
from queen.broker.topics.settle import NOT_LEASED, ack_in, find_places
from queen.log.quotas import Quotas
from queen.log.topic_store import Entry, Stored
from queen.log.topics import TopicCatalog
from queen.storage.database import Fetcher, Transaction, TransactionRefused
from queen.wire.topics.requests import EnqueueItem, ItemRef


class TopicTransactionOps:
    """Acks and enqueues as part of the caller's transaction."""

    def __init__(self, catalog: TopicCatalog, enqueuer: Enqueuer, quotas: Quotas) -> None:
        self._catalog = catalog
        self._quotas = quotas
        self._enqueuer = enqueuer

    async def admit(self, items: Sequence[EnqueueItem]) -> None:
        """Count items against the quotas of their namespaces. Raises `QuotaExceeded`."""
        if items:
            await self._quotas.admit(items)

    async def ack_in(self, transaction: Transaction, refs: Sequence[ItemRef]) -> None:
        """Remove leased items. Raises `TransactionRefused` when one of the references is not leased."""
        if not refs:
            return
        places = await find_places(self._catalog, refs)
        done = {_identity(place.ref) for place in await ack_in(transaction, places)}
        for ref in refs:
            if _identity(ref) not in done:
                raise TransactionRefused(f"ACK operation failed: {NOT_LEASED}: {ref.id} in {ref.namespace}/{ref.topic}")

    async def enqueue_in(self, transaction: Fetcher, entries: Sequence[Entry]) -> Stored:
        """Store items; a duplicate has the id of the first, as in any enqueue."""
        return await self._enqueuer.store(transaction, entries) if entries else Stored()

    def settle(self, stored: Stored) -> None:
        """Committed: wake waiting dequeues."""
        self._enqueuer.settle(stored)


def _identity(ref: ItemRef) -> tuple[int, str, str, str | None]:
    return ref.number, ref.namespace, ref.topic, ref.lease_owner
