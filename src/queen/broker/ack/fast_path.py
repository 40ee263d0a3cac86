"""The common acknowledgment: everything in the request completes messages of one lease that this worker gave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from queen.broker.ack.cursors import CursorKey
from queen.broker.ack.leases import Lease, LeaseBook, OnFreed
from queen.log.catalog import Catalog, Partition
from queen.metrics.meter import Meter, clock
from queen.storage.database import Fetcher
from queen.wire.ack import AckItem
from queen.wire.ids import parse_partition_uuid

_COMPLETED = frozenset({None, "", "completed", "success"})

_encode = msgspec.json.encode


@dataclass(slots=True, eq=False)
class AckRequest:
    items: list[AckItem]
    group: str
    batch: bool
    render: Callable[[bytes], Any]
    answer: asyncio.Future[Any]
    began: float

    def resolve(self, body: bytes) -> None:
        if not self.answer.done():
            self.answer.set_result(self.render(body))


@dataclass(slots=True, eq=False)
class _LeaseAck:
    """Requests that ack the same lease, and how far."""

    partition: Partition
    lease_id: str
    lease: Lease
    upto: int
    requests: list[tuple[AckRequest, int]]
    """Each with how far it acks."""


class Acked(NamedTuple):
    """A live lease that was acked: whether that ended it, how many messages wait, and where its cursor is now."""

    released: bool
    available: int
    committed: int


async def complete_leases(fetcher: Fetcher, acks: Sequence[tuple[CursorKey, str, int]]) -> dict[int, Acked]:
    """Ack (cursor, lease id, up to which offset), in order of the cursors. Those whose lease is live, by position."""
    rows = await fetcher.fetch(
        "ack",
        [key[0] for key, _, _ in acks],
        [key[1] for key, _, _ in acks],
        [lease_id for _, lease_id, _ in acks],
        [upto for _, _, upto in acks],
    )
    return {row["slot"] - 1: Acked(row["released"], row["available"], row["committed"]) for row in rows}


class AckFastPath:
    """Serves the common requests, with as little work per item as possible."""

    def __init__(self, catalog: Catalog, leases: LeaseBook, on_freed: OnFreed, meter: Meter) -> None:
        self._catalog = catalog
        self._leases = leases
        self._on_freed = on_freed
        self._meter = meter

    async def serve(self, fetcher: Fetcher, batch: Sequence[AckRequest]) -> list[AckRequest]:
        """Apply and answer the requests it can; returns the others."""
        found, rest = self._sort(batch)
        if not found:
            return rest
        keys = sorted(found)
        done = await complete_leases(fetcher, [(key, found[key].lease_id, found[key].upto) for key in keys])
        freed = []
        meter, now = self._meter, clock()
        for position, key in enumerate(keys):
            lease_ack = found[key]
            outcome = done.get(position)
            if outcome is None:
                rest += [request for request, _ in lease_ack.requests]
                continue
            released, available, committed = outcome
            lease, before = lease_ack.lease, committed
            if committed == lease_ack.upto:
                before, lease.acked = lease.acked, committed
            if released:
                self._leases.finish(lease_ack.lease_id, key[0])
                freed.append((lease_ack.partition.queue_id, *key, available))
            for request, upto in lease_ack.requests:
                meter.acked(lease_ack.partition.queue_name, len(request.items))
                meter.ack_latency.observe(now - request.began)
                request.resolve(_render(request.items, lease_ack.partition, released, noop=upto <= before))
        self._on_freed(freed)
        return rest

    def _sort(self, batch: Sequence[AckRequest]) -> tuple[dict[CursorKey, _LeaseAck], list[AckRequest]]:
        found: dict[CursorKey, _LeaseAck] = {}
        rest: list[AckRequest] = []
        for request in batch:
            own = self._recognise(request)
            if own is None:
                rest.append(request)
                continue
            key, lease_ack = own
            other = found.setdefault(key, lease_ack)
            if other is not lease_ack:
                if other.lease_id != lease_ack.lease_id:
                    rest.append(request)
                    continue
                other.upto = max(other.upto, lease_ack.upto)
                other.requests += lease_ack.requests
        return found, rest

    def _recognise(self, request: AckRequest) -> tuple[CursorKey, _LeaseAck] | None:
        """What the request acks, if all of it completes messages of one lease in the book."""
        items = request.items
        first = items[0]
        partition_uuid, lease_id = first.partition_id, first.lease_id
        partition_id = parse_partition_uuid(partition_uuid)
        group_id = self._catalog.cached_group(request.group)
        if partition_id is None or not lease_id or group_id is None:
            return None
        lease = self._leases.get(lease_id, partition_id)
        partition = self._catalog.cached_partition_by_id(partition_id)
        if lease is None or partition is None or lease.group_id != group_id:
            return None
        for item in items:
            if item.lease_id != lease_id or item.partition_id != partition_uuid or item.status not in _COMPLETED:
                return None
        offsets = lease.offsets()
        try:
            upto = max([offsets[item.transaction_id] for item in items]) + 1
        except KeyError:
            return None
        return (partition_id, group_id), _LeaseAck(partition, lease_id, lease, upto, [(request, upto)])


def _render(items: Sequence[AckItem], partition: Partition, released: bool, *, noop: bool) -> bytes:
    tail = b',"success":true,"error":null,"queueName":%b,"partitionName":%b,"leaseReleased":%b,"dlq":false%b}' % (
        _encode(partition.queue_name),
        _encode(partition.name),
        b"true" if released else b"false",
        b',"noop":true' if noop else b"",
    )
    lines = [
        b'{"index":%d,"transactionId":%b%b' % (i, _encode(item.transaction_id), tail) for i, item in enumerate(items)
    ]
    return b"[" + b",".join(lines) + b"]"
