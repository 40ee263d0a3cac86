"""What a queue promises while operators delete, redrive, seek, pause, clear and retain beside its consumers."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.model import Ack, Cursor, Outcome, Partition, QueueModel


@dataclass
class Log(Partition):
    """A partition that has an end and a beginning: offsets below `floor` are not delivered, below `stored` not kept."""

    id: str = ""
    messages: list[str] = field(default_factory=list)
    """Message ids by offset."""
    payloads: list[int] = field(default_factory=list)
    deleted: set[int] = field(default_factory=set)
    floor: int = 0
    stored: int = 0
    old: int = 0
    """Up to where messages have aged."""

    def alive(self, offset: int) -> bool:
        return offset >= self.stored and offset not in self.deleted

    def living(self, start: int, stop: int) -> list[int]:
        return [offset for offset in range(max(start, self.floor), stop) if self.alive(offset)]

    def newest(self, transaction_id: str) -> int | None:
        """The newest message of that name that is not deleted and may still be delivered."""
        found = [offset for offset in self.living(0, len(self.log)) if self.log[offset] == transaction_id]
        return found[-1] if found else None

    def append(self, transaction_id: str, message_id: str, payload: int) -> None:
        self.ids[transaction_id] = message_id
        self.log.append(transaction_id)
        self.messages.append(message_id)
        self.payloads.append(payload)

    def forget(self) -> None:
        """Names of messages that are deleted, or stored no more, are free."""
        held = {
            self.log[offset]: self.messages[offset]
            for offset in range(self.stored, len(self.log))
            if offset not in self.deleted
        }
        self.ids = held


class OperatedModel(QueueModel):
    """One queue, its options, and what operators may do to it."""

    def __init__(self) -> None:
        super().__init__()
        self.partitions: defaultdict[str, Log] = defaultdict(Log)  # type: ignore[assignment]
        self.letters: set[tuple[str, int, str]] = set()
        """(partition, offset, group) of dead letters."""
        self.names: dict[tuple[str, int], tuple[str, int]] = {}
        """Transaction id and payload of each of them."""
        self.paused: set[str] = set()
        """Groups that are paused; "" for the queue."""
        self.conflated: set[str] = set()
        self.delay = False
        """Whether only what has aged is delivered."""
        self.ttl = False
        """Whether what has aged is not delivered, and cut off by the next pop that comes across it."""

    def copy(self) -> OperatedModel:
        return copy.deepcopy(self)

    def start(self, partition: str, group: str) -> int:
        log = self.partitions[partition]
        return max(self.cursors.get((partition, group), Cursor()).committed, log.floor)

    def first(self, partition: str, group: str) -> int:
        """Where the next pop begins."""
        start = self.start(partition, group)
        return max(start, self.partitions[partition].old) if self.ttl else start

    def blocked(self, partition: str, group: str) -> bool:
        cursor = self.cursors.get((partition, group), Cursor())
        return bool(self.paused & {"", group}) or cursor.leased or cursor.delayed

    def available_offsets(self, partition: str, group: str) -> list[int]:
        """What pops of the partition are to be given, in order."""
        if self.blocked(partition, group):
            return []
        log = self.partitions[partition]
        start = self.first(partition, group)
        stop = max(start, log.old) if self.delay else len(log.log)
        found = log.living(start, stop)
        return found[-1:] if group in self.conflated else found

    def batch(self, partition: str, group: str, size: int) -> list[int]:
        """What a pop of the partition is given: of so many offsets those that were not deleted, if there are any."""
        found = self.available_offsets(partition, group)
        if group in self.conflated or not found:
            return found
        start = self.first(partition, group)
        start += (found[0] - start) // size * size
        return [offset for offset in found if offset < start + size]

    def take(self, partition: str, group: str, offsets: Sequence[int], lease: str | None) -> None:
        cursor = self.cursors[partition, group]
        cursor.committed = max(self.first(partition, group), offsets[0] if group in self.conflated else 0)
        cursor.take(offsets[-1] + 1, lease)

    def give_up(self, partition: str, group: str, offset: int) -> None:
        """A message that was deleted, or is stored no more, leaves nothing to keep."""
        if self.partitions[partition].alive(offset):
            self.bury(partition, offset, group)

    def bury(self, partition: str, offset: int, group: str) -> None:
        log = self.partitions[partition]
        self.letters.add((partition, offset, group))
        self.names[partition, offset] = log.log[offset], log.payloads[offset]

    def dead_at(self, partition: str, transaction_id: str) -> list[int]:
        """The offsets of dead letters of that name."""
        return sorted({o for p, o, _ in self.letters if p == partition and self.names[p, o][0] == transaction_id})

    def found(self, partition: str, transaction_id: str) -> tuple[int | None, list[int]]:
        """The message that a route for single messages means, and the offsets of the dead letters it means."""
        newest = self.partitions[partition].newest(transaction_id)
        if newest is not None and any((p, o) == (partition, newest) for p, o, _ in self.letters):
            return newest, [newest]
        return newest, self.dead_at(partition, transaction_id)

    def named(self, partition: str, transaction_id: str) -> list[int]:
        """The messages that a bulk route means."""
        dead = self.dead_at(partition, transaction_id)
        newest = self.partitions[partition].newest(transaction_id)
        return dead or ([newest] if newest is not None else [])

    def delete(self, partition: str, offsets: Sequence[int]) -> int:
        """How many of them there were, as messages or as dead letters."""
        log = self.partitions[partition]
        gone = {offset for offset in offsets if log.alive(offset)}
        letters = {letter for letter in self.letters if letter[0] == partition and letter[1] in offsets}
        log.deleted |= gone
        self.letters -= letters
        log.forget()
        return len(gone | {offset for _, offset, _ in letters})

    def positions(self, group: str) -> dict[str, int]:
        return {p: self.start(p, group) for (p, g) in self.cursors if g == group and p in self.partitions}

    def transact(self, groups: Sequence[tuple[str, str, Sequence[Ack]]]) -> bool:
        """Apply acks inside a transaction; False, and nothing is changed, when one of them is in its way."""
        if any(ack.status == "retry" for _, _, acks in groups for ack in acks):
            return False
        tried = self.copy()
        outcomes: list[Outcome] = []
        for partition, group, acks in groups:
            outcomes += tried.ack(partition, group, acks, final=True)
        if not all(outcome.success for outcome in outcomes):
            return False
        self.__dict__.update(tried.__dict__)
        return True

    def expire(self) -> None:
        for cursor in self.cursors.values():
            cursor.live = cursor.delayed = False
