"""The broker of one worker: its parts, wired, and what they tell each other."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from queen.broker.ack.acker import Acker
from queen.broker.ack.dead_letters import DeadLetters
from queen.broker.ack.leases import LeaseBook, Releaser, Renewer
from queen.broker.ack.redrive import Redriver
from queen.broker.catalog import Catalog, Partition
from queen.broker.change_log import ChangeReader
from queen.broker.events import (
    HOST_ONLY,
    Datagram,
    Event,
    EventKind,
    decode_datagram,
    encode_datagram,
    freed,
    held,
    look,
    named,
    pushed,
    taken,
    turn,
)
from queen.broker.heartbeat import DatabaseHeartbeat, DatabaseProbe, MaintenanceModes, Mode
from queen.broker.inspect.browse import MessageBrowser
from queen.broker.inspect.find import MessageFinder
from queen.broker.inspect.messages import Messages
from queen.broker.inspect.traces import Traces
from queen.broker.maintenance.cleanup import shard_jobs
from queen.broker.maintenance.jobs import JobRunner, cleaning_jobs
from queen.broker.pop.claims import Claimer
from queen.broker.pop.namespace_pop import NamespacePops
from queen.broker.pop.popper import Popper
from queen.broker.pop.scanner import Share
from queen.broker.push.append_batch import BatchAssembler
from queen.broker.push.append_lock import AppendLock
from queen.broker.push.appender import Appender, Spans
from queen.broker.push.dedup import Dedup
from queen.broker.push.dedup_filter import DedupFilter, SpillFile, unpack_hashes
from queen.broker.push.pusher import Pusher
from queen.broker.push.replay import SpoolDrainer
from queen.broker.push.slices import SlicePreparer
from queen.broker.push.spool_router import SpoolRouter
from queen.broker.segments import SegmentCache
from queen.broker.topics.jobs import topic_jobs
from queen.broker.topics.topics import TOPIC_EVENTS, Topics
from queen.broker.transactions.stages import Stages
from queen.broker.transactions.stream_cycles import StreamCycles
from queen.broker.transactions.stream_queries import StreamQueries
from queen.broker.transactions.transactions import Transactions
from queen.bus.local_bus import LocalBus
from queen.bus.peers import Peers, by_shard, is_relayed
from queen.metrics.meter import Meter
from queen.settings import Settings
from queen.spool.spool import Spool
from queen.storage.database import Database
from queen.wire.envelope import Envelope
from queen.wire.ids import IdSource

_EVENTS_PER_DATAGRAM = 1000
_PUSHED = EventKind.PUSHED.value
_MOST_HASHES = 4000


class Broker:
    """Everything a worker does with queues. Parts are public: routes call the one they need."""

    def __init__(
        self,
        settings: Settings,
        dsn: str,
        worker_id: int,
        runtime_dir: Path,
        meter: Meter,
        peers: Peers | None = None,
        shard: int = 0,
    ) -> None:
        """`peers` are ties to other hosts that are somebody else's."""
        self.settings = settings
        self.siblings: Sequence[Broker] = ()
        """The brokers of all shards in the order of their numbers, where there are several."""
        self.worker_id = worker_id
        self.meter = meter
        self.database = Database(
            dsn,
            pool_size=settings.db_pool_size,
            connect_timeout=settings.db_connection_timeout / 1000,
            statement_timeout_ms=settings.db_statement_timeout,
            lock_timeout_ms=settings.db_lock_timeout,
            application_name=f"queen worker {worker_id}",
        )
        self.database_probe = DatabaseProbe(self.database)
        self.envelope = Envelope([bytes.fromhex(key) for key in settings.queen_encryption_key])
        self.ids = IdSource()
        self.cache = SegmentCache(settings.segment_cache_mb << 20)
        self.catalog = Catalog(self.database, on_created=self._queue_created, on_partitions=meter.partitions_made)
        self.dedup = Dedup(self.envelope, _seen_filter(settings))
        self.leases = LeaseBook()
        self.bus = LocalBus(runtime_dir, worker_id, settings.num_workers, self._receive)
        self._alone = settings.num_workers == 1
        self.peers = peers or Peers(settings, runtime_dir, self.bus.send, self._heard)
        preparer = SlicePreparer(self.envelope, self.ids)
        assembler = BatchAssembler(self.dedup, preparer, dedup_window=settings.dedup_window_seconds)
        appender = Appender(assembler, self.dedup, self.cache, announce=self._announce_stored, on_stored=self._stored)
        self.turn = AppendLock(
            runtime_dir,
            wanted=lambda: self._send([turn(EventKind.TURN_WANTED)]),
            passed_on=lambda: self._send([turn(EventKind.TURN_DONE)]),
        )
        self.spool = Spool.open(
            settings.spool_dir,
            runtime_dir / "spool",
            records_per_file=settings.file_buffer_events_per_file,
            most_bytes=settings.file_buffer_max_mb << 20,
        )
        self.modes = MaintenanceModes()
        self.watch = DatabaseHeartbeat(
            self.database,
            self.modes,
            patience=settings.db_away_ms / 1000,
            on_lost=lambda: self.spool.board.set_trouble(True),
            on_modes=self._modes_changed,
        )
        spool_router = SpoolRouter(self.spool, self.modes, self.database.presence, preparer, self.envelope)
        self.pusher = Pusher(
            self.database, self.catalog, preparer, appender, self.ids, self.turn, self.bus.drain, spool_router, meter
        )
        self.replayer = SpoolDrainer(
            self.spool,
            self.database,
            self.catalog,
            self.pusher,
            self.envelope,
            self.modes,
            interval=settings.file_buffer_flush_ms / 1000,
            most_records=settings.file_buffer_max_batch,
        )
        self.claimer = Claimer(
            self.database,
            self.catalog,
            self.cache,
            self.leases,
            self.envelope,
            self.ids,
            self._held,
            self._taken,
            meter,
        )
        self.popper = Popper(
            self.database,
            self.catalog,
            self.claimer,
            self.bus.drain,
            self._subscribed,
            self._left,
            meter,
            safety_poll=settings.pop_safety_poll_ms / 1000,
            share=Share(worker_id, settings.num_workers),
            default_subscription=settings.default_subscription_mode,
        )
        self.selections = NamespacePops(self.catalog, self.popper)
        self.changes = ChangeReader(
            self.database,
            self.catalog,
            known_queues=lambda: self.popper.known_queues() | self.catalog.known_queues(),
            queues_are=self.popper.queues_are,
            take_in=self._take_in,
            forget_everything=self._forget_everything,
            interval=settings.queen_sync_reconcile_ms / 1000,
        )
        self.acker = Acker(self.database, self.catalog, self.leases, self.envelope, self._freed, meter)
        self.renewer = Renewer(self.database)
        self.releaser = Releaser(self.database, self.leases, self._freed)
        wal = Spool.open(
            settings.wal_path,
            runtime_dir / "wal",
            records_per_file=settings.file_buffer_events_per_file,
            most_bytes=settings.file_buffer_max_mb << 20,
            most_messages=settings.max_buffer_length,
        )
        self.topics = Topics(settings, self.database, self.ids, worker_id, self._send, meter, wal, shard, runtime_dir)
        self.transactions = Transactions(
            self.database,
            self.catalog,
            self.pusher,
            self.leases,
            self.envelope,
            self.ids,
            self._freed,
            meter,
            self.topics.steps,
        )
        self.stages = Stages(
            self.database,
            self.envelope,
            self.ids,
            self.topics.steps,
            self._published,
            dedup_window=settings.dedup_window_seconds,
            seen=_seen_filter(settings),
        )
        self.stream_queries = StreamQueries(self.database, self.catalog, self.envelope)
        self.stream_cycles = StreamCycles(
            self.database, self.catalog, self.stream_queries, self.pusher, self.leases, self.envelope, self._freed
        )
        redriver = Redriver(
            self.database,
            self.catalog,
            self.pusher,
            self.dedup,
            self.envelope,
            dedup_window=settings.dedup_window_seconds,
        )
        finder = MessageFinder(self.catalog, self.envelope)
        self.message_browser = MessageBrowser(self.database, self.catalog, self.envelope, finder)
        self.messages = Messages(self.database, self.catalog, self.envelope, finder, redriver, self.publish)
        self.dead_letters = DeadLetters(self.database, self.catalog, self.envelope, redriver)
        self.traces = Traces(self.database, self.catalog, self.leases, self.envelope, worker_id)
        self.jobs = JobRunner(
            self.database,
            lambda push_listener: [
                *cleaning_jobs(settings, self.publish, push_listener),
                *topic_jobs(settings),
                *shard_jobs(settings),
            ],
        )

    async def start(self) -> None:
        self.bus.start()
        await self.watch.start()
        self.replayer.start()
        self.popper.start()
        await self.topics.start()
        self.changes.start()
        self.peers.start()
        self.jobs.start()

    async def stop(self) -> None:
        """Finish what was accepted, answer parked pops, and close."""
        await self.jobs.stop()
        await self.changes.stop()
        await self.popper.stop()
        await self.topics.stop()
        batchers = (
            self.pusher.batcher,
            self.pusher.buffering,
            self.acker.batcher,
            self.renewer.batcher,
            self.releaser.batcher,
        )
        for batcher in batchers:
            await batcher.join()
        await self.peers.stop()
        await self.replayer.stop()
        await self.watch.stop()
        await self.spool.close()
        self.bus.close()
        self.turn.close()
        await self.database_probe.stop()
        await self.database.close()

    def publish(self, events: Sequence[Event]) -> None:
        """Let this and every other worker know."""
        for event in events:
            if event[0] == EventKind.PARTITION_GONE:
                self._count_gone(event[1])
            self._take_in(event)
        self._send(events)

    async def notify(self, queue_name: str, partition_name: str | None) -> None:
        """Somebody says that something may wait in a queue, or in one partition of it: have every pop look."""
        queue = await self.catalog.queue(queue_name)
        if queue is None:
            return
        partition = await self.catalog.partition(queue, partition_name) if partition_name else None
        self.publish([look(queue.id) if partition is None else pushed(queue.id, partition.id, 1)])

    async def switch(self, mode: Mode, enabled: bool) -> None:
        """Switch a maintenance mode on or off, for every worker of every host."""
        await self.watch.switch(mode, enabled)
        self._send([turn(EventKind.MODES_CHANGED)])

    def _modes_changed(self) -> None:
        self.popper.pause(self.modes.pop_maintenance)
        if not self.modes.push_maintenance:
            # Whoever ends maintenance may well have mended what was in the way.
            self.replayer.retry_failed()

    def _count_gone(self, queue_id: int) -> None:
        queue = self.catalog.cached_queue_by_id(queue_id)
        if queue is not None:
            self.meter.partitions_removed(queue.name, 1)

    def _stored(self, stored: Spans) -> None:
        for partition, _, count in stored:
            self.meter.stored(partition.queue_name, count)
            self._fed(partition.queue_id, partition.id, count)
        if self.peers.active:
            self.peers.publish([pushed(partition.queue_id, partition.id, count) for partition, _, count in stored])

    def _fed(self, queue_id: int, partition_id: int, count: int) -> None:
        """Messages were added to a partition, here or elsewhere."""
        self.popper.fed(queue_id, partition_id, count)
        self.jobs.push_listener.pushed(queue_id, partition_id)

    def _announce_stored(self, stored: Spans, hashes: list[int]) -> Callable[[], None]:
        """Put what is going to be stored into words; returns what sends them to the other workers."""
        if self._alone or not stored:
            return lambda: None
        datagrams, start = [], 0
        for some in _portions(stored):
            end = start + sum(count for _, _, count in some)
            datagram = Datagram(
                [pushed(partition.queue_id, partition.id, count) for partition, _, count in some],
                [(partition.id, base, count) for partition, base, count in some],
                array("Q", hashes[start:end]).tobytes(),
            )
            datagrams.append(encode_datagram(datagram))
            start = end
        return partial(self._send_all, datagrams)

    def _send_all(self, datagrams: Sequence[bytes]) -> None:
        for datagram in datagrams:
            self.bus.send(datagram)

    def _published(self, fed: Sequence[tuple[Partition, int]]) -> None:
        """Messages were published that nobody here has seen."""
        for partition, count in fed:
            self.meter.stored(partition.queue_name, count)
        self.publish([pushed(partition.queue_id, partition.id, count) for partition, count in fed])

    def _freed(self, leases: Sequence[tuple[int, int, int, int]]) -> None:
        # What the others said before comes first: that a lease began must not be heard after it has ended.
        self.bus.drain()
        events = [freed(*lease) for lease in leases]
        for event in events:
            self._take_in(event)
        # Where somebody waits here, the partition is taken at once: telling the others would only make them try.
        takers: dict[tuple[int, int], int] = {}
        left: list[Event] = []
        for event in events:
            lane = (event[1], event[3])
            if lane not in takers:
                takers[lane] = self.popper.awaiting(*lane, most=len(events))
            takers[lane] -= 1
            if takers[lane] < 0:
                left.append(event)
            else:
                self.popper.keep(event[1], event[2], event[3])
        self._send(left)

    def _left(self, leases: Sequence[tuple[int, int, int, int]]) -> None:
        """Leases ended, and nobody here has taken what they held."""
        self._send([freed(*lease) for lease in leases])

    def _held(self, leases: Sequence[tuple[int, int, int, float]]) -> None:
        """The others need not try for what this worker has just leased.

        Heard late, perhaps after the lease has ended, it would keep them from what is there: then better not at all.
        """
        self._hint([held(*lease) for lease in leases])

    def _taken(self, places: Sequence[tuple[int, int, int]]) -> None:
        """The others may believe that something is there still."""
        self._hint([taken(*place) for place in places])

    def _subscribed(self, group: str, change: int) -> None:
        """Others may believe that the group starts at the beginning: they are to look again."""
        self.changes.told(change)
        self._send([named(EventKind.GROUP_CHANGED, group, change)])

    def _queue_created(self, names: Sequence[str]) -> None:
        self.publish([named(EventKind.QUEUE_CHANGED, name) for name in names])

    def _send(self, events: Sequence[Event]) -> None:
        if self.peers.active:
            self.peers.publish([event for event in events if event[0] not in HOST_ONLY])
        if not self._alone:
            for datagram in self._datagrams(events):
                self.bus.send(datagram)

    def _hint(self, events: Sequence[Event]) -> None:
        """Tell those workers of this host who can hear it now."""
        if not self._alone:
            for datagram in self._datagrams(events):
                self.bus.hint(datagram)

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

    def _receive(self, data: bytes) -> None:
        if is_relayed(data):
            self.peers.take_relayed(data)
            return
        try:
            datagram = decode_datagram(data)
        except (msgspec.DecodeError, msgspec.ValidationError):
            # From a worker of another version during an upgrade; the slow poll makes up for it.
            return
        if datagram.hashes:
            cached = self.catalog.cached_partition_by_id
            self.dedup.learn(
                unpack_hashes(datagram.hashes),
                [(cached(partition_id), base, count) for partition_id, base, count in datagram.spans],
            )
        self._take_in_news(datagram.events)

    def _heard(self, events: Sequence[Event]) -> None:
        """Another host did something."""
        for shard, some in by_shard(events).items():
            broker = self if shard == 0 else self.siblings[shard] if shard < len(self.siblings) else None
            if broker is not None:
                broker._take_in_news([event for event in some if event[0] not in HOST_ONLY])

    def _take_in_news(self, events: Sequence[Event]) -> None:
        for event in events:
            if event[0] == EventKind.QUEUE_CHANGED:
                self.catalog.refresh_queue(event[5])
            self._take_in(event)

    def _take_in(self, event: Event) -> None:
        kind, name = event[0], event[5]
        if kind == _PUSHED:
            # By far the most of all.
            self._fed(event[1], event[2], event[4])
            return
        if kind in TOPIC_EVENTS:
            self.topics.handle(event)
            return
        if kind == EventKind.QUEUE_GONE:
            self.catalog.forget_queue(name)
            self.jobs.nudge()
        elif kind == EventKind.GROUP_CHANGED:
            self.catalog.forget_group(name)
            self.changes.told(event[4])
        elif kind == EventKind.PARTITION_CHANGED:
            self.cache.forget(event[2])
        elif kind == EventKind.PARTITION_GONE:
            self.cache.forget(event[2])
            self.catalog.forget_partition_id(event[2])
        elif kind == EventKind.MODES_CHANGED:
            self.watch.nudge()
        elif kind == EventKind.TURN_WANTED:
            self.turn.peer_wants()
        elif kind == EventKind.TURN_DONE:
            self.turn.peer_done()
        self.popper.handle(event)

    def _forget_everything(self) -> None:
        """What is remembered may be out of date in ways nobody can tell."""
        self.catalog.forget_everything()
        self.cache.forget_everything()
        self.popper.forget_everything()


def _seen_filter(settings: Settings) -> DedupFilter:
    overflow = SpillFile(settings.queen_data_dir, settings.dedup_disk_mb << 20)
    return DedupFilter(settings.dedup_memory_mb << 20, overflow)


def _portions(stored: Spans) -> Iterator[list[tuple[Partition, int, int]]]:
    """Cut what was stored into pieces that fit a datagram each."""
    some: list[tuple[Partition, int, int]] = []
    messages = 0
    for partition, first, total in stored:
        for base in range(first, first + total, _MOST_HASHES):
            count = min(_MOST_HASHES, first + total - base)
            if some and (messages + count > _MOST_HASHES or len(some) >= _EVENTS_PER_DATAGRAM // 2):
                yield some
                some, messages = [], 0
            some.append((partition, base, count))
            messages += count
    if some:
        yield some
