"""Finding the message that a partition id and a transaction id name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from queen.errors import NotFound
from queen.log.catalog import Catalog, Partition, Queue
from queen.log.segments import Located, StoredMessage, UnreadableSegment, find_message, stored_message
from queen.storage.database import Fetcher, Record, storable
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.ids import parse_partition_uuid


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A message: where it lies in its partition (None: it is gone from there), and its dead letters, newest first."""

    partition: Partition
    queue: Queue
    transaction_id: str
    located: Located | None
    letters: Sequence[Record]

    @property
    def offset(self) -> int:
        if self.located is not None:
            return self.located.offset
        offset: int = self.letters[0]["message_offset"]
        return offset


class MessageFinder:
    """Finds messages of one shard."""

    def __init__(self, catalog: Catalog, envelope: Envelope) -> None:
        self._catalog = catalog
        self._envelope = envelope

    async def find(self, fetcher: Fetcher, partition_id: str, transaction_id: str) -> FoundMessage:
        """The newest message of that name, or what its dead letters kept of it; raises `NotFound`."""
        number = parse_partition_uuid(partition_id)
        if number is None:
            raise NotFound("Message not found")
        rows = await fetcher.fetch("partition_place", number)
        partition = (await self._catalog.partitions_by_id([number])).get(number) if rows else None
        queue = await self._catalog.queue_of(partition) if partition is not None else None
        if partition is None or queue is None:
            raise NotFound("Message not found")
        floor = rows[0]["floor_offset"]
        located = await find_message(fetcher, self._envelope, partition.id, transaction_id, floor)
        letters: Sequence[Record] = []
        if located is not None:
            letters = await fetcher.fetch("dead_letters_at", partition.id, located.offset)
        if not letters:
            letters = await fetcher.fetch("dead_letters_named", partition.id, storable(transaction_id))
        if located is None and not letters:
            raise NotFound("Message not found")
        return FoundMessage(partition, queue, transaction_id, located, letters)

    def read(self, found: FoundMessage) -> StoredMessage:
        """What the message carries."""
        if found.located is not None:
            return stored_message(found.located.segment, found.located.index, found.transaction_id)
        letter = found.letters[0]
        try:
            payload = self._envelope.open(letter["body"])
        except EnvelopeError as error:
            raise UnreadableSegment(f"the message cannot be read: {error}") from error
        return StoredMessage(
            str(letter["message_id"]),
            letter["original_created_at"],
            letter["transaction_id"],
            letter["trace_id"],
            letter["producer_sub"],
            payload,
        )
