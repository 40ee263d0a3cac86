"""The broker of each shard, wired: push, pop, ack, topics, and which notification goes where."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from queen.broker.ack.acker import Acker
from queen.broker.ack.dead_letters import DeadLetters
from queen.broker.ack.leases import LeaseBook, Releaser, Renewer
from queen.broker.ack.redrive import Redriver
from queen.broker.answer_size import Answers
from queen.broker.broker import Broker
from queen.broker.change_log import ChangeReader
from queen.broker.events import Event, EventKind, named, signal
from queen.broker.heartbeat import DatabaseHeartbeat, DatabaseProbe, MaintenanceModes
from queen.broker.inspect.browse import MessageBrowser
from queen.broker.inspect.bulk import BulkMessages
from queen.broker.inspect.find import MessageFinder
from queen.broker.inspect.messages import Messages
from queen.broker.inspect.search import MessageSearch
from queen.broker.inspect.traces import Traces
from queen.broker.maintenance.cleanup import shard_jobs
from queen.broker.maintenance.jobs import JobRunner, cleaning_jobs
from queen.broker.notifications import Notifications
from queen.broker.pop.claims import Claimer
from queen.broker.pop.namespace_pop import NamespacePops
from queen.broker.pop.popper import Popper
from queen.broker.pop.scanner import Share
from queen.broker.push.announcer import Announcer
from queen.broker.push.append_lock import AppendLock
from queen.broker.push.pusher import Pusher
from queen.broker.push.replay import SpoolDrainer
from queen.broker.push.spool_router import SpoolRouter
from queen.broker.state.ephemeral import Ephemeral
from queen.broker.state.key_values import KeyValues
from queen.broker.state.locks import Locks
from queen.broker.state.timers import Timers
from queen.broker.topics.jobs import topic_jobs
from queen.broker.topics.topics import TOPIC_EVENTS, Topics
from queen.broker.transactions.inbox import InboxDrainer
from queen.broker.transactions.inbox_append import InboxAppender
from queen.broker.transactions.stream_cycles import StreamCycles
from queen.broker.transactions.stream_queries import StreamQueries
from queen.broker.transactions.timer_firing import TimerFiring
from queen.broker.transactions.transactions import Transactions
from queen.bus.peers import Peers, ShardPeers
from queen.log.append_batch import BatchAssembler
from queen.log.appender import Appender
from queen.log.catalog import Catalog
from queen.log.dedup import Dedup
from queen.log.dedup_filter import DedupFilter, SpillFile
from queen.log.segments import SegmentCache
from queen.log.slices import SlicePreparer
from queen.log.stages import Stages
from queen.metrics.meter import Meter
from queen.settings import Settings
from queen.spool.spool import Spool
from queen.storage.database import Database
from queen.wire.envelope import Envelope
from queen.wire.ids import IdSource


def make_brokers(settings: Settings, worker_id: int, runtime_dir: Path) -> tuple[Broker, ...]:
    """One for each shard. The first has the directories that a server with one shard has; memory is divided."""
    dsns, meter = settings.database_dsns, Meter()
    if len(dsns) == 1:
        return (make_broker(settings, dsns[0], worker_id, runtime_dir, meter),)
    shared = dataclasses.replace(
        settings,
        segment_cache_mb=max(1, settings.segment_cache_mb // len(dsns)),
        dedup_memory_mb=max(1, settings.dedup_memory_mb // len(dsns)),
        dedup_disk_mb=settings.dedup_disk_mb // len(dsns),
    )
    first = make_broker(shared, dsns[0], worker_id, runtime_dir, meter)
    brokers = [first]
    for number, dsn in enumerate(dsns[1:], start=1):
        directory = runtime_dir / f"shard-{number}"
        directory.mkdir(parents=True, exist_ok=True)
        own = dataclasses.replace(
            shared,
            file_buffer_dir=str(settings.spool_dir / f"shard-{number}"),
            wal_dir=str(settings.wal_path / f"shard-{number}"),
        )
        peers = ShardPeers(own, directory, first.peers, number)
        brokers.append(make_broker(own, dsn, worker_id, directory, meter, peers, shard=number))
    first.notifications.shards = [broker.notifications for broker in brokers]
    return tuple(brokers)


def make_broker(
    settings: Settings,
    dsn: str,
    worker_id: int,
    runtime_dir: Path,
    meter: Meter,
    peers: Peers | None = None,
    shard: int = 0,
) -> Broker:
    """Wire a broker; `peers` (else its own) are how it reaches other hosts."""
    base = _Base(settings, dsn, worker_id, runtime_dir, meter, peers)
    push = _Push(base)
    pop = _Pop(base)
    ack = _Ack(base, pop, push)
    answers = Answers(settings.answer_bytes)
    topics = _topics(base, shard, answers)
    sharded = len(settings.database_dsns) > 1
    key_values = KeyValues(base.database, base.catalog, meter, sharded=sharded, answers=answers)
    timers = Timers(base.database, base.catalog, base.envelope, base.ids, meter, sharded=sharded)
    transactions = Transactions(
        base.database,
        base.catalog,
        push.pusher,
        base.leases,
        base.envelope,
        base.ids,
        pop.popper.leases_ended,
        meter,
        topics.transaction_ops,
        key_values,
        timers,
    )
    stages = Stages(
        base.database,
        base.envelope,
        base.ids,
        topics.transaction_ops,
        push.announcer.published,
        dedup_window=settings.dedup_window_seconds,
        dedup_filter=_dedup_filter(settings),
    )
    stream_queries = StreamQueries(
        base.database, base.catalog, base.envelope, Answers(settings.state_bytes, answers.turns)
    )
    stream_cycles = StreamCycles(
        base.database, base.catalog, stream_queries, push.pusher, base.leases, base.envelope, pop.popper.leases_ended
    )
    finder = MessageFinder(base.catalog, base.envelope)
    search = MessageSearch(base.database, base.catalog, base.envelope, answers)
    jobs = JobRunner(
        base.database,
        lambda push_listener: [
            *cleaning_jobs(settings, base.notifications.publish, push_listener),
            *topic_jobs(settings),
            *shard_jobs(settings),
        ],
    )
    appender = InboxAppender(base.database, base.catalog, push.pusher, topics, base.envelope, base.ids, meter)
    inbox = InboxDrainer(
        base.database,
        jobs.elected,
        base.modes,
        appender,
        poll_seconds=settings.sql_push_poll_ms / 1000,
    )
    heartbeat = _heartbeat(base, push, pop)
    _subscribe(base, push, pop, topics, jobs, heartbeat)
    base.changes.on_unnotified_writes(pop.popper.poll, topics.dequeuer.wake_all, topics.multi_dequeuer.wake_all)
    return Broker(
        settings=settings,
        worker_id=worker_id,
        meter=meter,
        database=base.database,
        database_probe=DatabaseProbe(base.database),
        heartbeat=heartbeat,
        modes=base.modes,
        envelope=base.envelope,
        catalog=base.catalog,
        cache=base.cache,
        notifications=base.notifications,
        peers=base.peers,
        changes=base.changes,
        dedup=push.dedup,
        append_lock=push.lock,
        pusher=push.pusher,
        spool=push.spool,
        replayer=push.replayer,
        claimer=pop.claimer,
        popper=pop.popper,
        namespace_pops=NamespacePops(base.catalog, pop.popper),
        acker=ack.acker,
        renewer=ack.renewer,
        releaser=ack.releaser,
        dead_letters=DeadLetters(base.database, base.catalog, base.envelope, ack.redriver, answers),
        topics=topics,
        key_values=key_values,
        locks=Locks(base.database, key_values, base.ids, meter),
        timers=timers,
        ephemeral=Ephemeral(
            base.database,
            base.notifications,
            meter,
            longest_wait_ms=settings.max_wait_ms,
            most_bytes=settings.answer_bytes,
        ),
        timer_firing=TimerFiring(base.database, jobs.elected, base.modes, timers, appender, base.envelope),
        transactions=transactions,
        stages=stages,
        inbox=inbox,
        stream_queries=stream_queries,
        stream_cycles=stream_cycles,
        message_browser=MessageBrowser(base.database, base.catalog, base.envelope, finder),
        message_search=search,
        bulk_messages=BulkMessages(
            base.database, base.catalog, base.envelope, search, ack.redriver, base.notifications.publish
        ),
        messages=Messages(base.database, base.catalog, base.envelope, finder, ack.redriver, base.notifications.publish),
        traces=Traces(
            base.database,
            base.catalog,
            base.leases,
            base.envelope,
            worker_id,
            answers,
        ),
        jobs=jobs,
    )


class _Base:
    """What every room of a broker stands on."""

    def __init__(
        self,
        settings: Settings,
        dsn: str,
        worker_id: int,
        runtime_dir: Path,
        meter: Meter,
        peers: Peers | None,
    ) -> None:
        self.settings = settings
        self.worker_id = worker_id
        self.runtime_dir = runtime_dir
        self.meter = meter
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
        self.modes = MaintenanceModes()
        self.leases = LeaseBook()
        self.cache = SegmentCache(settings.segment_cache_mb << 20)
        self.notifications = Notifications(runtime_dir, worker_id, settings.num_workers, meter)
        self.peers = peers or Peers(
            settings, runtime_dir, self.notifications.bus.send, self.notifications.receive_hosts
        )
        self.notifications.peers = self.peers
        self.catalog = Catalog(self.database, on_created=self._queues_created, on_partitions=meter.partitions_made)
        self.changes = ChangeReader(
            self.database,
            self.catalog,
            self.notifications,
            on_gap=self.cache.forget_everything,
            interval=settings.queen_sync_reconcile_ms / 1000,
            workers=settings.num_workers,
        )

    def _queues_created(self, names: Sequence[str]) -> None:
        self.notifications.publish([named(EventKind.QUEUE_CHANGED, name, 1) for name in names])


class _Push:
    """The push room."""

    def __init__(self, base: _Base) -> None:
        settings, notifications = base.settings, base.notifications
        preparer = SlicePreparer(base.envelope, base.ids)
        self.dedup = Dedup(base.envelope, _dedup_filter(settings))
        self.announcer = Announcer(notifications, base.catalog, self.dedup, base.meter)
        appender = Appender(
            BatchAssembler(self.dedup, preparer, dedup_window=settings.dedup_window_seconds),
            self.dedup,
            base.cache,
            announce=self.announcer.prepare,
            on_stored=self.announcer.stored,
            on_recognised=self.announcer.published,
        )
        self.lock = AppendLock(
            base.runtime_dir,
            wanted=lambda: notifications.send([signal(EventKind.APPEND_LOCK_WANTED)]),
            released=lambda: notifications.send([signal(EventKind.APPEND_LOCK_RELEASED)]),
        )
        self.spool = Spool.open(
            settings.spool_dir,
            base.runtime_dir / "spool",
            records_per_file=settings.file_buffer_events_per_file,
            most_bytes=settings.file_buffer_max_mb << 20,
        )
        router = SpoolRouter(self.spool, base.modes, base.database.availability, preparer, base.envelope)
        self.pusher = Pusher(
            base.database,
            base.catalog,
            preparer,
            appender,
            base.ids,
            self.lock,
            notifications.drain,
            router,
            base.meter,
        )
        self.replayer = SpoolDrainer(
            self.spool,
            base.database,
            base.catalog,
            self.pusher,
            base.envelope,
            base.modes,
            notifications.publish,
            interval=settings.file_buffer_flush_ms / 1000,
            most_records=settings.file_buffer_max_batch,
        )


class _Pop:
    """The pop room."""

    def __init__(self, base: _Base) -> None:
        settings = base.settings
        self.claimer = Claimer(
            base.database,
            base.catalog,
            base.cache,
            base.leases,
            base.envelope,
            base.ids,
            base.notifications,
            base.meter,
            most_bytes=settings.answer_bytes,
        )
        self.popper = Popper(
            base.database,
            base.catalog,
            self.claimer,
            base.notifications,
            base.changes.mark_applied,
            base.meter,
            safety_poll=settings.pop_safety_poll_ms / 1000,
            share=Share(base.worker_id, settings.num_workers),
            default_subscription=settings.default_subscription_mode,
        )
        base.changes.add_cache(self.popper)


class _Ack:
    """The ack room."""

    def __init__(self, base: _Base, pop: _Pop, push: _Push) -> None:
        on_freed = pop.popper.leases_ended
        self.acker = Acker(base.database, base.catalog, base.leases, base.envelope, on_freed, base.meter)
        self.renewer = Renewer(base.database)
        self.releaser = Releaser(base.database, base.leases, on_freed)
        self.redriver = Redriver(
            base.database,
            base.catalog,
            push.pusher,
            push.dedup,
            base.envelope,
            dedup_window=base.settings.dedup_window_seconds,
        )


def _topics(base: _Base, shard: int, answers: Answers) -> Topics:
    settings = base.settings
    wal = Spool.open(
        settings.wal_path,
        base.runtime_dir / "wal",
        records_per_file=settings.file_buffer_events_per_file,
        most_bytes=settings.file_buffer_max_mb << 20,
        most_messages=settings.max_buffer_length,
    )
    return Topics(
        settings,
        base.database,
        base.ids,
        base.worker_id,
        base.notifications.send,
        base.meter,
        wal,
        shard,
        base.runtime_dir,
        answers,
    )


def _heartbeat(base: _Base, push: _Push, pop: _Pop) -> DatabaseHeartbeat:
    def modes_changed() -> None:
        pop.popper.pause(base.modes.pop_maintenance)
        if not base.modes.push_maintenance:
            # Maintenance has ended: what was refused before may be accepted now.
            push.replayer.retry_failed()

    return DatabaseHeartbeat(
        base.database,
        base.modes,
        grace=base.settings.db_away_ms / 1000,
        on_down=lambda: push.spool.state.set_outage(True),
        on_modes=modes_changed,
    )


def _subscribe(
    base: _Base, push: _Push, pop: _Pop, topics: Topics, jobs: JobRunner, heartbeat: DatabaseHeartbeat
) -> None:
    """The dispatch table: who handles which notification. What is remembered is corrected before pops are served."""
    notifications, catalog, cache = base.notifications, base.catalog, base.cache
    notifications.subscribe_ids(push.announcer.learn)
    # A worker that changes a queue itself has read it again already.
    notifications.subscribe({EventKind.QUEUE_CHANGED: lambda event: catalog.refresh_queue(event[5])}, own=False)
    notifications.subscribe(
        {
            EventKind.QUEUE_GONE: lambda event: catalog.forget_queue(event[5]),
            EventKind.GROUP_CHANGED: lambda event: catalog.forget_group(event[5]),
            EventKind.PARTITION_CHANGED: lambda event: cache.forget(event[2]),
            EventKind.PARTITION_GONE: lambda event: cache.forget(event[2]),
            EventKind.MODES_CHANGED: lambda event: heartbeat.trigger(),
            EventKind.APPEND_LOCK_WANTED: lambda event: push.lock.peer_wants(),
            EventKind.APPEND_LOCK_RELEASED: lambda event: push.lock.peer_released(),
        }
    )
    notifications.subscribe({EventKind.PARTITION_GONE: partial(_count_removed, base)}, received=False)
    notifications.subscribe({EventKind.PARTITION_GONE: lambda event: catalog.forget_partition_id(event[2])})
    notifications.subscribe(base.changes.handlers())
    notifications.subscribe(pop.popper.handlers())
    notifications.subscribe(jobs.handlers())
    notifications.subscribe(dict.fromkeys(TOPIC_EVENTS, topics.handle))


def _count_removed(base: _Base, event: Event) -> None:
    queue = base.catalog.cached_queue_by_id(event[1])
    if queue is not None:
        base.meter.partitions_removed(queue.name, 1)


def _dedup_filter(settings: Settings) -> DedupFilter:
    spill = SpillFile(settings.queen_data_dir, settings.dedup_disk_mb << 20)
    return DedupFilter(settings.dedup_memory_mb << 20, spill)
