"""The broker of one worker: its parts, wired, and what they tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from queen.broker.ack import Acker
from queen.broker.append import Appender
from queen.broker.catalog import Catalog, Partition
from queen.broker.claims import Claimer
from queen.broker.dedup import Dedup
from queen.broker.events import Event, EventKind, decode_events, encode_events, freed, named, pushed
from queen.broker.leases import LeaseBook
from queen.broker.lots import Packer
from queen.broker.pop import Popper
from queen.broker.push import Pusher
from queen.broker.renew import Renewer
from queen.broker.segments import SegmentCache
from queen.broker.selections import Selections
from queen.broker.transaction import Transactions
from queen.cluster.local_bus import LocalBus
from queen.settings import Settings
from queen.storage.database import Database
from queen.wire.envelope import Envelope
from queen.wire.ids import IdSource

_EVENTS_PER_DATAGRAM = 1000


class Broker:
    """Everything a worker does with queues. Parts are public: routes call the one they need."""

    def __init__(self, settings: Settings, dsn: str, worker_id: int, runtime_dir: Path) -> None:
        self.settings = settings
        self.worker_id = worker_id
        self.database = Database(
            dsn,
            pool_size=settings.db_pool_size,
            connect_timeout=settings.db_connection_timeout / 1000,
            statement_timeout_ms=settings.db_statement_timeout,
            lock_timeout_ms=settings.db_lock_timeout,
            application_name=f"queen worker {worker_id}",
        )
        self.envelope = Envelope([bytes.fromhex(key) for key in settings.queen_encryption_key])
        self.ids = IdSource()
        self.cache = SegmentCache(settings.segment_cache_mb << 20)
        self.catalog = Catalog(self.database, on_created=self._queue_created)
        self.dedup = Dedup(self.envelope, settings.dedup_memory_mb << 20)
        self.leases = LeaseBook()
        self.bus = LocalBus(runtime_dir, worker_id, settings.num_workers, self._receive)
        self._alone = settings.num_workers == 1
        packer = Packer(self.dedup, self.envelope, self.ids, dedup_window=settings.dedup_window_seconds)
        appender = Appender(packer, self.dedup, self.cache, self._stored)
        self.pusher = Pusher(self.database, self.catalog, appender, self.ids)
        self.claimer = Claimer(self.database, self.catalog, self.cache, self.leases, self.envelope, self.ids)
        self.popper = Popper(
            self.database,
            self.catalog,
            self.claimer,
            self.bus.drain,
            safety_poll=settings.pop_safety_poll_ms / 1000,
            default_subscription=settings.default_subscription_mode,
        )
        self.selections = Selections(self.catalog, self.popper)
        self.acker = Acker(self.database, self.catalog, self.leases, self.envelope, self._freed)
        self.renewer = Renewer(self.database)
        self.transactions = Transactions(
            self.database, self.catalog, self.pusher, self.leases, self.envelope, self.ids, self._freed
        )

    async def start(self) -> None:
        self.bus.start()
        self.popper.start()

    async def stop(self) -> None:
        """Finish what was accepted, answer parked pops, and close."""
        await self.popper.stop()
        for fusion in (self.pusher.fusion, self.acker.fusion, self.renewer.fusion):
            await fusion.join()
        self.bus.close()
        await self.database.close()

    def tell(self, events: Sequence[Event]) -> None:
        """Let this and every other worker know."""
        for event in events:
            self._take_in(event)
        self._send(events)

    def _stored(self, stored: Sequence[tuple[Partition, int]]) -> None:
        for partition, count in stored:
            self.popper.fed(partition.queue_id, partition.id, count)
        if not self._alone:
            self._send([pushed(partition.queue_id, partition.id, count) for partition, count in stored])

    def _freed(self, leases: Sequence[tuple[int, int, int, int]]) -> None:
        if leases:
            self.tell([freed(*lease) for lease in leases])

    def _queue_created(self, names: Sequence[str]) -> None:
        self.tell([named(EventKind.QUEUE_CHANGED, name) for name in names])

    def _send(self, events: Sequence[Event]) -> None:
        if self._alone:
            return
        for start in range(0, len(events), _EVENTS_PER_DATAGRAM):
            self.bus.send(encode_events(events[start : start + _EVENTS_PER_DATAGRAM]))

    def _receive(self, datagram: bytes) -> None:
        try:
            events = decode_events(datagram)
        except (msgspec.DecodeError, msgspec.ValidationError):
            # From a worker of another version during an upgrade; the slow poll makes up for it.
            return
        for event in events:
            kind, name = event[0], event[5]
            if kind == EventKind.QUEUE_CHANGED:
                self.catalog.refresh_queue(name)
            self._take_in(event)

    def _take_in(self, event: Event) -> None:
        kind, name = event[0], event[5]
        if kind == EventKind.QUEUE_GONE:
            self.catalog.forget_queue(name)
        elif kind == EventKind.GROUP_CHANGED:
            self.catalog.forget_group(name)
        elif kind == EventKind.PARTITION_CHANGED:
            self.cache.forget(event[2])
        self.popper.handle(event)
