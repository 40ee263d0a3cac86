"""Operations on single messages: delete, retry, dead-letter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from queen.broker.ack.cursors import dead_letter
from queen.broker.ack.redrive import Copy, Redriver
from queen.broker.change_log import log_partition_change
from queen.broker.events import Event
from queen.broker.inspect.find import FoundMessage, MessageFinder
from queen.errors import NotFound
from queen.log.catalog import QUEUE_MODE, Catalog
from queen.log.segments import UnreadableSegment, read_segment
from queen.storage.database import Database, Transaction, retry_transaction
from queen.wire.api.messages.browse import MessageDeadLettered, MessageDeleted, MessageRetried
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.segment import MalformedSegment


class Messages:
    """Changes messages of one shard, named by their partition id and transaction id."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        envelope: Envelope,
        finder: MessageFinder,
        redriver: Redriver,
        publish: Callable[[Sequence[Event]], None],
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._envelope = envelope
        self._finder = finder
        self._redriver = redriver
        self._publish = publish

    async def delete(self, partition_id: str, transaction_id: str) -> MessageDeleted:
        """Delete a message, its dead letters and its traces. Who leases it right now keeps what it has.

        When its transaction id was used again after the dedup window, the message that is a dead letter is meant.
        """
        return await retry_transaction(lambda: self._delete(partition_id, transaction_id))

    async def _delete(self, partition_id: str, transaction_id: str) -> MessageDeleted:
        found = await self._finder.find(self._database, partition_id, transaction_id)
        offsets = {letter["message_offset"] for letter in found.letters} or {found.offset}
        rewritten = False
        changes: list[Event] = []
        async with self._database.transaction() as transaction:
            for offset in sorted(offsets):
                rewritten |= await self._take_out(transaction, found, offset)
            rows = await transaction.fetch("delete_dead_letters_at", found.partition.id, list(offsets))
            await transaction.fetch("delete_traces_of", found.partition.id, list(offsets))
            if rewritten:
                changes.append(await log_partition_change(transaction, found.partition.queue_id, found.partition.id))
        self._publish(changes)
        if not rewritten and not rows:
            raise NotFound("Message not found")
        return MessageDeleted(**_about(found), message="Message deleted successfully")

    async def retry(self, partition_id: str, transaction_id: str) -> MessageRetried:
        """Store a copy at the tail of the partition, for every group, and remove the message's dead letters.

        The copy has a transaction id of its own when the old one is inside the dedup window. Of several calls at the
        same time for a dead letter, one stores the copy and the others find that done (`retried` is false).
        """
        found = await self._finder.find(self._database, partition_id, transaction_id)
        removed = 0
        if found.letters:
            redriven = []
            for offset in sorted({letter["message_offset"] for letter in found.letters}):
                messages, letters = await self._redriver.letters(found.queue, [(found.partition.id, offset)], None)
                redriven += messages
                removed += letters
        else:
            message = self._finder.read(found)
            copy = Copy(found.partition, transaction_id, message.payload, message.trace_id, message.created_at)
            redriven = [await self._redriver.message(found.queue, copy, message.producer)]
        newest = redriven[-1] if redriven else None
        return MessageRetried(
            **_about(found),
            retried=newest is not None,
            new_transaction_id=newest.new_transaction_id if newest else None,
            new_message_id=newest.new_message_id if newest else None,
            dead_letters_removed=removed,
        )

    async def dead_letter(
        self, partition_id: str, transaction_id: str, group: str = QUEUE_MODE, error: str = ""
    ) -> MessageDeadLettered:
        """Make a message a dead letter of a group. Nothing else changes: if it is pending it is still delivered."""
        found = await self._finder.find(self._database, partition_id, transaction_id)
        if found.located is None:
            raise NotFound("Message not found")
        group_id = await self._catalog.group(group)
        stored = await dead_letter(
            self._database, self._envelope, found.partition, group_id, found.offset, error, 0, found.queue
        )
        if not stored:
            raise NotFound("Message not found")
        message_id = found.located.segment.block.text(found.located.index)
        return MessageDeadLettered(**_about(found), consumer_group=group, message_id=message_id)

    async def _take_out(self, transaction: Transaction, found: FoundMessage, offset: int) -> bool:
        """Rewrite the segment without the message at an offset; False when it is gone, or was deleted before."""
        rows = await transaction.fetch("lock_segment_of", found.partition.id, offset)
        if not rows:
            return False
        try:
            segment = read_segment(self._envelope, rows[0])
        except (EnvelopeError, MalformedSegment) as error:
            raise UnreadableSegment(f"the message cannot be deleted: {error}") from error
        index = offset - segment.base_offset
        if index >= segment.count or segment.is_deleted(index):
            return False
        encrypt = found.queue.encryption_enabled or self._envelope.is_encrypted(rows[0]["body"])
        body = self._envelope.seal(segment.without(index), encrypt=encrypt)
        await transaction.fetch("rewrite_segment", found.partition.id, segment.base_offset, body)
        return True


def _about(found: FoundMessage) -> dict[str, Any]:
    return {
        "success": True,
        "partition_id": found.partition.uuid,
        "transaction_id": found.transaction_id,
        "queue": found.queue.name,
        "partition": found.partition.name,
    }
