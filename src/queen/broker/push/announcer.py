"""Announcing what was appended: to the pops of this worker, the other workers of the host, and other hosts."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from queen.broker.events import Datagram, encode_datagram, pushed
from queen.broker.notifications import Notifications
from queen.log.appender import Spans
from queen.log.catalog import Catalog, Partition
from queen.log.dedup import Dedup
from queen.log.dedup_filter import unpack_hashes
from queen.metrics.meter import Meter

_MOST_HASHES = 4000
_MOST_SPANS = 500
"""Per datagram, so that it stays below what the bus takes."""


class Announcer:
    """Makes appends known."""

    def __init__(self, notifications: Notifications, catalog: Catalog, dedup: Dedup, meter: Meter) -> None:
        self._notifications = notifications
        self._catalog = catalog
        self._dedup = dedup
        self._meter = meter

    def prepare(self, spans: Spans, hashes: list[int]) -> Callable[[], None]:
        """Encode what is about to be stored; returns what sends it to the other workers of this host."""
        if not self._notifications.reaches_workers or not spans:
            return _nothing
        datagrams, start = [], 0
        for some in _portions(spans):
            end = start + sum(count for _, _, count in some)
            datagram = Datagram(
                [pushed(partition.queue_id, partition.id, count) for partition, _, count in some],
                [(partition.id, base, count) for partition, base, count in some],
                array("Q", hashes[start:end]).tobytes(),
            )
            datagrams.append(encode_datagram(datagram))
            start = end
        return partial(self._send, datagrams)

    def stored(self, spans: Spans) -> None:
        """Wake the pops of this worker, and notify the other hosts; the workers of this host know already."""
        events = []
        for partition, _, count in spans:
            self._meter.stored(partition.queue_name, count)
            events.append(pushed(partition.queue_id, partition.id, count))
        self._notifications.handle(events)
        self._notifications.send_hosts(events)

    def published(self, counts: Sequence[tuple[Partition, int]]) -> None:
        """Messages were stored without the appender: no worker has their ids in its dedup filter."""
        for partition, count in counts:
            self._meter.stored(partition.queue_name, count)
        self._notifications.publish([pushed(partition.queue_id, partition.id, count) for partition, count in counts])

    def learn(self, hashes: bytes, spans: Sequence[tuple[int, int, int]]) -> None:
        """Learn the ids that another worker has stored."""
        cached = self._catalog.cached_partition_by_id
        self._dedup.learn(
            unpack_hashes(hashes), [(cached(partition_id), base, count) for partition_id, base, count in spans]
        )

    def _send(self, datagrams: Sequence[bytes]) -> None:
        for datagram in datagrams:
            self._notifications.bus.send(datagram)


def _nothing() -> None:
    return


def _portions(spans: Spans) -> Iterator[list[tuple[Partition, int, int]]]:
    """Cut the spans of an append into pieces that fit a datagram each."""
    some: list[tuple[Partition, int, int]] = []
    messages = 0
    for partition, first, total in spans:
        for base in range(first, first + total, _MOST_HASHES):
            count = min(_MOST_HASHES, first + total - base)
            if some and (messages + count > _MOST_HASHES or len(some) >= _MOST_SPANS):
                yield some
                some, messages = [], 0
            some.append((partition, base, count))
            messages += count
    if some:
        yield some
