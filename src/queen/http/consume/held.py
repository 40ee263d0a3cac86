"""The leases that were delivered over one WebSocket and are not over yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from queen.broker.ack.leases import HeldLease
from queen.wire.ack import AckItem
from queen.wire.ids import parse_lease, parse_partition_uuid, partition_number

# It cannot occur inside a JSON text, where its second quote would be escaped: the first one found is a field.
_LEASE_FIELD: Final = b'"leaseId":"'
_LEASE_LENGTH: Final = 36


class _Message(msgspec.Struct):
    partition_id: str = msgspec.field(name="partitionId")


class _Messages(msgspec.Struct):
    messages: list[_Message]


class _Result(msgspec.Struct):
    released: bool = msgspec.field(name="leaseReleased")


_messages = msgspec.json.Decoder(_Messages)
_results = msgspec.json.Decoder(list[_Result])


@dataclass(slots=True, eq=False)
class Held:
    """One lease: its subscription, the messages that it still holds, and its expiry."""

    lease: HeldLease
    subscription: str
    group: str
    until: float
    open: set[int]


def lease_of(body: bytes) -> HeldLease | None:
    """The lease under which the answer of a pop was delivered; None where its messages are consumed already."""
    start = body.find(_LEASE_FIELD) + len(_LEASE_FIELD)
    lease_id = body[start : start + _LEASE_LENGTH].decode("ascii", "replace")
    place = parse_lease(lease_id)
    if place is None:
        return None
    partition_id, several = place
    if not several:
        return HeldLease(lease_id, (partition_id,))
    uuids = {message.partition_id for message in _messages.decode(body).messages}
    return HeldLease(lease_id, tuple(number for uuid in uuids if (number := parse_partition_uuid(uuid)) is not None))


class HeldLeases:
    """What would have to be released, were the connection to end now."""

    def __init__(self) -> None:
        self._by_id: dict[str, Held] = {}
        self._by_cursor: dict[tuple[int, str], Held] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._by_id.values())

    def get(self, lease_id: str | None) -> Held | None:
        return self._by_id.get(lease_id) if lease_id else None

    def covers(self, lease_id: str | None, partition: str | None) -> bool:
        """Whether a lease was delivered here, and for this partition; None: whichever."""
        held = self.get(lease_id)
        if held is None or partition is None:
            return held is not None
        return parse_partition_uuid(partition) in held.lease.partition_ids

    def add(self, lease: HeldLease, subscription: str, group: str, until: float) -> None:
        held = Held(lease, subscription, group, until, set(lease.partition_ids))
        self._by_id[lease.lease_id] = held
        for partition_id in lease.partition_ids:
            self._by_cursor[partition_id, group] = held

    def drop(self, held: Held) -> None:
        self._by_id.pop(held.lease.lease_id, None)
        for partition_id in held.open:
            if self._by_cursor.get((partition_id, held.group)) is held:
                del self._by_cursor[partition_id, held.group]

    def settle(self, items: Sequence[AckItem], group: str, results: bytes) -> None:
        """Forget the leases that acks have ended, by the results of the acks."""
        if b'"leaseReleased":true' not in results:
            return
        ended = {(item.lease_id, item.partition_id) for item in items}
        if len(ended) > 1:
            answered = zip(items, _results.decode(results), strict=True)
            ended = {(item.lease_id, item.partition_id) for item, result in answered if result.released}
        for lease_id, partition in ended:
            number = partition_number(partition)
            held = self._by_cursor.get((number, group))
            if held is None or (lease_id and lease_id != held.lease.lease_id):
                continue
            held.open.discard(number)
            del self._by_cursor[number, group]
            if not held.open:
                del self._by_id[held.lease.lease_id]

    def take_all(self) -> list[HeldLease]:
        """Take everything that is held, to release it."""
        leases = [held.lease for held in self._by_id.values()]
        self._by_id.clear()
        self._by_cursor.clear()
        return leases

    def take_expired(self, now: float) -> list[Held]:
        """The leases that have expired."""
        expired = [held for held in self._by_id.values() if held.until <= now]
        for held in expired:
            self.drop(held)
        return expired

    def take_of(self, subscription: str) -> list[HeldLease]:
        """Take what one subscription holds, to release it."""
        own = [held for held in self._by_id.values() if held.subscription == subscription]
        for held in own:
            self.drop(held)
        return [held.lease for held in own]
