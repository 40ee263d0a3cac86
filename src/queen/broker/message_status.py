"""What has become of a message, read off the cursors of its partition."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from queen.broker.catalog import QUEUE_MODE
from queen.storage.database import Fetcher


class MessageStatus(StrEnum):
    PENDING = "pending"
    PROCESSING = "processing"
    COMPLETED = "completed"
    DEAD_LETTER = "dead_letter"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one group stands on a partition: the first offset it has not consumed, and until when it leases more."""

    group: str
    committed: int
    leased_until: datetime | None

    def consumed(self, offset: int) -> bool:
        return offset < self.committed


@dataclass(slots=True)
class Readers:
    """The groups that read a partition; `queue_mode` is the one of consumers that name none."""

    queue_mode: Standing | None = None
    groups: list[Standing] = field(default_factory=list)

    def status(self, offset: int, *, dead: bool) -> MessageStatus:
        """Queue mode decides if it reads the partition; else all groups must have consumed the message."""
        if dead or self.queue_mode is not None or not self.groups:
            return self.queue_status(offset, dead=dead)
        return MessageStatus.COMPLETED if self.consumed_by(offset) == len(self.groups) else MessageStatus.PENDING

    def queue_status(self, offset: int, *, dead: bool) -> MessageStatus:
        """The status as queue mode alone sees it."""
        if dead:
            return MessageStatus.DEAD_LETTER
        if self.queue_mode is None:
            return MessageStatus.PENDING
        if self.queue_mode.consumed(offset):
            return MessageStatus.COMPLETED
        return MessageStatus.PROCESSING if self.queue_mode.leased_until is not None else MessageStatus.PENDING

    def consumed_by(self, offset: int) -> int:
        """How many groups have consumed the message, queue mode not counted."""
        return sum(standing.consumed(offset) for standing in self.groups)

    def leased_until(self, offset: int) -> datetime | None:
        """When queue mode's lease on the message ends, if there is one."""
        if self.queue_mode is None or self.queue_mode.consumed(offset):
            return None
        return self.queue_mode.leased_until

    @property
    def every(self) -> list[Standing]:
        return [*([self.queue_mode] if self.queue_mode else []), *self.groups]


def mode(*, queue_mode: bool, groups: int) -> dict[str, object]:
    """How messages are consumed: by whoever comes (queue), by groups (bus), by both, or not at all."""
    kinds = {(False, False): "none", (True, False): "queue", (False, True): "bus", (True, True): "hybrid"}
    return {"hasQueueMode": queue_mode, "busGroupsCount": groups, "type": kinds[queue_mode, groups > 0]}


async def read_standings(fetcher: Fetcher, partition_ids: Collection[int]) -> dict[int, Readers]:
    """Who reads each partition, and how far."""
    readers = {partition_id: Readers() for partition_id in partition_ids}
    for row in await fetcher.fetch("cursors_of", list(readers)):
        standing = Standing(row["name"], row["committed"], row["leased_until"])
        if standing.group == QUEUE_MODE:
            readers[row["partition_id"]].queue_mode = standing
        else:
            readers[row["partition_id"]].groups.append(standing)
    return readers
