"""Notifications among workers and hosts: publishing events, and dispatching received ones to their handlers.

A handler runs inside the push, pop or ack that happened to read the socket. What it raises is logged and counted by the
kind of its event, and never reaches that request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from queen.broker.events import HOST_ONLY, Datagram, Event, EventKind, decode_datagram, encode_datagram
from queen.bus.local_bus import LocalBus
from queen.bus.peers import Peers, by_shard, is_relayed
from queen.metrics.meter import Meter

log = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[Event], object]
Handlers: TypeAlias = Mapping[str, Handler]
"""The handlers of a component, by kind of event."""

OnIds: TypeAlias = Callable[[bytes, Sequence[tuple[int, int, int]]], object]
"""Given the packed hashes of transaction ids that another worker stored, and their (partition, first offset, count)."""

_DATAGRAM = "datagram"
"""Counted as the kind of what could not be decoded."""


class Notifications:
    """One broker's side of the notifications: the bus of its host, the other hosts, and the dispatch table."""

    def __init__(self, runtime_dir: Path, worker_id: int, workers: int, meter: Meter) -> None:
        self.bus = LocalBus(runtime_dir, worker_id, workers, self._receive)
        self.peers: Peers | None = None
        """The other hosts; set before the broker starts."""
        self.shards: Sequence[Notifications] = (self,)
        """Those of all shards, by their numbers: other hosts send events of all of them to the first."""
        self._alone = workers == 1
        self._meter = meter
        self._own: dict[str, tuple[Handler, ...]] = {}
        self._received: dict[str, tuple[Handler, ...]] = {}
        self._on_ids: OnIds | None = None

    def subscribe(self, handlers: Handlers, *, own: bool = True, received: bool = True) -> None:
        """Have events handled: those of this worker, and those received from others. First subscribed, first called."""
        for table in [self._own] * own + [self._received] * received:
            for kind, handler in handlers.items():
                # By the plain string that events carry: looking an enum member up takes longer.
                table[str(kind)] = (*table.get(str(kind), ()), handler)

    def subscribe_ids(self, on_ids: OnIds) -> None:
        """Have the transaction ids that other workers of the host store handled."""
        self._on_ids = on_ids

    def publish(self, events: Sequence[Event]) -> None:
        """Handle events here, and send them to every other worker."""
        self.handle(events)
        self.send(events)

    def handle(self, events: Iterable[Event]) -> None:
        """Handle events of this worker without sending them."""
        self._dispatch(self._own, events)

    def send(self, events: Sequence[Event]) -> None:
        """Send events to every other worker of this host and of the others."""
        self.send_hosts([event for event in events if event[0] not in HOST_ONLY])
        if not self._alone:
            for datagram in self._datagrams(events):
                self.bus.send(datagram)

    def send_hosts(self, events: Sequence[Event]) -> None:
        """Send events to the other hosts alone."""
        if self.reaches_hosts:
            assert self.peers is not None
            self.peers.publish(events)

    def hint(self, events: Sequence[Event]) -> None:
        """Send events to the workers of this host that can take them now: late they would mislead."""
        if not self._alone:
            for datagram in self._datagrams(events):
                self.bus.hint(datagram)

    @property
    def reaches_hosts(self) -> bool:
        """Whether peers are configured."""
        return self.peers is not None and self.peers.active

    @property
    def reaches_workers(self) -> bool:
        """Whether this host has other workers."""
        return not self._alone

    def drain(self) -> None:
        """Receive what the other workers of this host have sent."""
        self.bus.drain()

    def receive_hosts(self, events: Sequence[Event]) -> None:
        """Handle events of other hosts, each by its shard."""
        for shard, some in by_shard(events).items():
            if shard < len(self.shards):
                notifications = self.shards[shard]
                notifications._dispatch(notifications._received, [e for e in some if e[0] not in HOST_ONLY])

    def _receive(self, data: bytes) -> None:
        """Handle a datagram of another worker of this host."""
        if is_relayed(data):
            if self.peers is not None:
                self.peers.take_relayed(data)
            return
        try:
            datagram = decode_datagram(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            # From a worker of another version during an upgrade; the safety poll makes up for it.
            self._failed(_DATAGRAM, error)
            return
        if datagram.hashes and self._on_ids is not None:
            try:
                self._on_ids(datagram.hashes, datagram.spans)
            except Exception as error:
                self._failed(_DATAGRAM, error)
        self._dispatch(self._received, datagram.events)

    def _dispatch(self, table: Mapping[str, tuple[Handler, ...]], events: Iterable[Event]) -> None:
        for event in events:
            for handler in table.get(event[0], ()):
                try:
                    handler(event)
                except Exception as error:
                    self._failed(EventKind(event[0]).name.lower(), error)

    def _failed(self, kind: str, error: Exception) -> None:
        self._meter.notification_failed(kind)
        log.error("notification %s could not be handled: %s", kind, error, exc_info=error)

    def _datagrams(self, events: Sequence[Event]) -> Iterator[bytes]:
        some: list[Event] = []
        room = self.bus.largest
        for event in events:
            # A character takes up to four bytes, the rest of an event hardly forty.
            size = 40 + 4 * len(event[5])
            if some and size > room:
                yield encode_datagram(Datagram(some))
                some, room = [], self.bus.largest
            some.append(event)
            room -= size
        if some:
            yield encode_datagram(Datagram(some))
