"""What a queue promises, in memory: the log of each partition, the cursor of each group on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

RETRY_LIMIT = 1
LATE = "Invalid or expired lease"
CONSUMED = "Message already committed: the group has consumed it, so it cannot be failed or retried"
SKIPPED = "Not applied: an earlier message of the batch failed and is redelivered first"


@dataclass
class Cursor:
    """How far a group has read a partition, and the lease it has out."""

    committed: int = 0
    lease: str | None = None
    lease_end: int = 0
    live: bool = False
    finished: str | None = None
    attempts: int = 0
    delayed: bool = False
    """Whether the retry of a failed batch is not due yet (`retryDelay`)."""

    @property
    def leased(self) -> bool:
        return self.lease is not None and self.live

    def take(self, end: int, lease: str | None) -> None:
        """A pop: a lease, or (None) consumed at once."""
        self.lease, self.lease_end, self.live = lease, end, lease is not None
        if lease is None:
            self.committed = end

    def consume(self, offset: int) -> bool:
        """Everything up to and with the offset is done; whether that finished the lease."""
        self.committed = max(self.committed, offset + 1)
        return self.lease is not None and self.committed >= self.lease_end

    def finish(self) -> None:
        self.finished, self.lease, self.live = self.lease, None, False

    def release(self) -> None:
        self.lease, self.live = None, False


@dataclass(frozen=True)
class Ack:
    offset: int
    status: str
    lease: str | None


@dataclass(frozen=True)
class Outcome:
    success: bool
    error: str | None = None
    dead: bool = False


@dataclass
class Partition:
    log: list[str] = field(default_factory=list)
    """Transaction ids by offset."""
    ids: dict[str, str] = field(default_factory=dict)
    """Message id by transaction id."""


class QueueModel:
    """One queue with a retry limit of `RETRY_LIMIT` and no retry delay."""

    retry_limit = RETRY_LIMIT
    retry_delay = False

    def __init__(self) -> None:
        self.partitions: dict[str, Partition] = {}
        self.cursors: defaultdict[tuple[str, str], Cursor] = defaultdict(Cursor)
        self.dead: set[tuple[str, str, str]] = set()

    def push(self, partition: str, transaction_id: str, message_id: str) -> bool:
        """Whether the message is new; a duplicate must name the first."""
        there = self.partitions.setdefault(partition, Partition())
        if transaction_id in there.ids:
            assert there.ids[transaction_id] == message_id, "the duplicate names another message"
            return False
        there.ids[transaction_id] = message_id
        there.log.append(transaction_id)
        return True

    def available(self, partition: str, group: str) -> list[str]:
        """What a pop of the partition may be given, in order."""
        if partition not in self.partitions:
            return []
        cursor = self.cursors.get((partition, group), Cursor())
        return [] if cursor.leased else self.partitions[partition].log[cursor.committed :]

    def offset(self, partition: str, transaction_id: str) -> int:
        return self.partitions[partition].log.index(transaction_id)

    def popped(self, partition: str, group: str, ids: Sequence[str], lease: str | None) -> None:
        """A pop was given these: they must be the next ones, and no other lease may hold them."""
        assert list(ids) == self.available(partition, group)[: len(ids)], "not the next messages in order"
        cursor = self.cursors[partition, group]
        cursor.take(cursor.committed + len(ids), lease)

    def ack(self, partition: str, group: str, acks: Sequence[Ack], *, final: bool = False) -> list[Outcome]:
        """Apply acks of one request; `final`: inside a transaction, where a failure is not retried."""
        cursor = self.cursors[partition, group]
        lease, live, finished = cursor.lease, cursor.live, cursor.finished
        first, may_retry = cursor.committed, cursor.attempts < self.retry_limit and not final
        outcomes = [Outcome(False)] * len(acks)
        ended = stopped = released = delayed = False
        for index in sorted(range(len(acks)), key=lambda i: acks[i].offset):
            ack = acks[index]
            if ack.lease and not (live and ack.lease == lease):
                repeated = ack.status == "completed" and ack.lease == finished and ack.offset < first
                outcomes[index] = Outcome(True) if repeated else Outcome(False, LATE)
            elif stopped:
                outcomes[index] = Outcome(True) if ack.status in ("failed", "retry") else Outcome(False, SKIPPED)
            elif ack.status == "completed":
                if cursor.consume(ack.offset):
                    ended = True
                    cursor.attempts = cursor.attempts if final else 0
                outcomes[index] = Outcome(True)
            elif ack.offset < first:
                outcomes[index] = Outcome(False, CONSUMED)
            elif ack.status == "retry" or (ack.status == "failed" and may_retry):
                stopped = True
                outcomes[index] = Outcome(True)
                if ack.status == "failed" and lease is not None:
                    delayed = self.retry_delay
                    cursor.attempts += live
            else:
                self.give_up(partition, group, ack.offset)
                ended = cursor.consume(ack.offset) or ended
                released = released or final or ack.status == "failed"
                outcomes[index] = Outcome(True, dead=True)
        if ended:
            cursor.finish()
        elif stopped or released:
            cursor.release()
        if lease is not None and (ended or stopped or released):
            cursor.delayed = delayed
        return outcomes

    def give_up(self, partition: str, group: str, offset: int) -> None:
        """The message becomes a dead letter of the group."""
        self.dead.add((partition, group, self.partitions[partition].log[offset]))

    def expire(self) -> None:
        for cursor in self.cursors.values():
            cursor.live = False

    def holds(self, lease: str) -> bool:
        return any(cursor.leased and cursor.lease == lease for cursor in self.cursors.values())

    def seek(self, group: str, committed: dict[str, int]) -> None:
        """Move the group's cursors to the offsets given by partition."""
        for partition, offset in committed.items():
            cursor = self.cursors[partition, group]
            cursor.release()
            cursor.committed = offset
