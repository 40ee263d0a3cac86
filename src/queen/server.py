"""The composition root: one worker process, wired."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import inspect
import os
import signal as signals
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from queen import __version__
from queen.broker.ack.acker import Acker
from queen.broker.ack.dead_letters import DeadLetters
from queen.broker.ack.leases import LeaseBook, Releaser, Renewer
from queen.broker.ack.redrive import Redriver
from queen.broker.broker import Broker
from queen.broker.change_log import ChangeReader
from queen.broker.events import Event, EventKind, named, signal
from queen.broker.heartbeat import DatabaseHeartbeat, DatabaseProbe, MaintenanceModes
from queen.broker.inspect.browse import MessageBrowser
from queen.broker.inspect.bulk import BulkMessages
from queen.broker.inspect.find import MessageFinder
from queen.broker.inspect.groups import Groups
from queen.broker.inspect.log_reader import LogReader
from queen.broker.inspect.messages import Messages
from queen.broker.inspect.resources import Resources
from queen.broker.inspect.search import MessageSearch
from queen.broker.inspect.seeks import Seeks
from queen.broker.inspect.standings import Standings
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
from queen.broker.queues import Queues
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
from queen.concurrency import BackgroundTask
from queen.dashboard import Dashboard
from queen.http.api.limits import UNPACKED, RequestLimits, Unpacking
from queen.http.api.table import add_routes
from queen.http.auth.audit import Audit, is_audited
from queen.http.auth.browser import BrowserRules
from queen.http.auth.guard import Guard, server_tls
from queen.http.auth.ip_limit import IpLimit
from queen.http.auth.lookup import BrokerLookup
from queen.http.auth.metrics import held_families, refusals
from queen.http.consume.consumers import Consumers
from queen.http.routing.context import Api, MetricSource, Shard
from queen.http.routing.view_cache import HostViewCache
from queen.http.server.limits import Limits, raise_file_limit
from queen.http.server.message import Access, Handler, Request, Response, Route
from queen.http.server.observe import SlowLog, watched
from queen.http.server.protocol import Gate, HttpServer
from queen.http.server.router import Around, Router
from queen.log.append_batch import BatchAssembler
from queen.log.appender import Appender
from queen.log.catalog import Catalog
from queen.log.dedup import Dedup
from queen.log.dedup_filter import DedupFilter, SpillFile
from queen.log.segments import SegmentCache
from queen.log.slices import SlicePreparer
from queen.log.stages import Stages
from queen.metrics.meter import Meter
from queen.metrics.report import SnapshotStore
from queen.monitoring.families import HostFamilies, PipelineFamilies
from queen.monitoring.history import History
from queen.monitoring.live import LiveFeed
from queen.monitoring.recorder import HttpStats, Recorder
from queen.monitoring.scrape import Scraper, ShardsScraper
from queen.monitoring.status import Status
from queen.redis.interfaces import Counters
from queen.settings import Settings
from queen.single_flight import SharedResult, SingleFlightCache
from queen.spool.spool import Spool
from queen.storage.database import Database
from queen.storage.shard_setup import check_alone
from queen.telemetry import start_tracing, stop_tracing
from queen.wire.envelope import Envelope
from queen.wire.ids import IdSource

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from queen.broker.sharding.shard_router import ShardRouter
    from queen.broker.sharding.sharded_broker import ShardedBroker
    from queen.http.sqs.endpoint import SqsEndpoint
    from queen.http.tracing import Tracing
    from queen.proxy.inside import ServerLogin

_GRACE_SECONDS = 8.0
_LAST_SPANS_SECONDS = 1.5
_RECURSION_LIMIT = 20_000


class Worker:
    """The brokers of the shards and the HTTP server in front of them. Several may run in one process, as in tests."""

    def __init__(
        self,
        settings: Settings,
        worker_id: int,
        runtime_dir: Path,
        port: int | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`port` (0: any free one) is for several workers in one process; else it is the setting."""
        self.settings = settings
        self.brokers = _brokers(settings, worker_id, runtime_dir)
        self.broker = self.brokers[0]
        self._sharded = _sharded(settings, self.brokers)
        front = self._sharded if self._sharded is not None else self.broker
        browsers = BrowserRules(settings)
        self.guard = Guard.from_settings(settings, BrokerLookup(self.brokers), browsers)
        self.consumers = Consumers(front, self.guard.consumer_limits)
        audit = Audit(self.brokers)
        router = Router(around=_around(settings, tracing, self.broker.topics.counters, audit))
        self.http = HttpServer(
            router,
            gate=self._gate(settings),
            header_lines=browsers.header_lines,
            lines_for=browsers.cors_lines,
            admits_host=browsers.is_host_admitted,
            check_head=self.guard.check_head,
            limits=_limits(settings),
            max_body_bytes=settings.body_bytes,
        )
        for broker in self.brokers:
            broker.popper.is_flooded = self._is_flooded
            broker.topics.dequeuer.is_flooded = self._is_flooded
            broker.topics.multi_dequeuer.is_flooded = self._is_flooded
        self.broker.meter.sources.append(refusals(self.guard.refused, lambda: self.http.budget))
        self.recorder = Recorder(
            self.broker,
            SnapshotStore(runtime_dir, worker_id, settings.num_workers),
            socket.gethostname(),
            HttpStats(self.http.statuses, self.http.in_flight),
        )
        standings = [Standings(broker.database, settings.stats_cache_ms / 1000) for broker in self.brokers]
        self._keeping_warm = [one.keep_warm for one in standings]
        self._warming: list[BackgroundTask] = []
        self.live = LiveFeed(
            self.brokers,
            self.recorder,
            standings,
            self._sharded.directory.changed if self._sharded is not None else None,
        )
        self.api = Api(
            settings,
            front,
            self.brokers,
            self.recorder,
            self._scraper(standings),
            self._metric_sources(),
            self.consumers,
            self.live,
            lambda: self.guard.trouble,
            keep_bodies=tracing is not None,
            open_connections=self.http.open_connections,
        )
        if self._sharded is not None:
            self.api.moves = self._sharded.moves
        router.fallback = Dashboard(wants_token=settings.jwt_enabled)
        self._login = _login(settings, settings.database_dsns[0]) if settings.queen_login else None
        if self._login is not None:
            router.fallback = self._login.before(router.fallback)
            self.guard.sessions = self._login
        host_cache = HostViewCache(runtime_dir) if settings.num_workers > 1 else None
        shards = [self._shard(broker, some) for broker, some in zip(self.brokers, standings, strict=True)]
        shard_router = self._sharded.router if self._sharded is not None else None
        add_routes(
            router, self.api, shards, SingleFlightCache(settings.stats_cache_ms / 1000, host_cache), shard_router
        )
        self._sqs = self._sqs_endpoint(shards, shard_router, audit) if settings.queen_sqs else None
        if self._sqs is not None:
            self._sqs.add_to(router)
            router.fallback = self._sqs.before(router.fallback)
            self.api.metric_sources = (*self.api.metric_sources, self._sqs.families)
        self.tls = server_tls(settings)
        self.port = settings.port if port is None else port

    def _sqs_endpoint(self, shards: Sequence[Shard], router: ShardRouter | None, audit: Audit) -> SqsEndpoint:
        # Loaded where it is asked for, and not in every worker.
        from queen.http.sqs.endpoint import SqsEndpoint

        return SqsEndpoint(
            self.settings, self.api.broker, shards, router, audit, self.guard.refused, self.guard.browsers
        )

    def _is_flooded(self) -> bool:
        return self.http.budget.is_flooded

    def _gate(self, settings: Settings) -> Gate:
        guard, limits = self.guard, RequestLimits(settings)
        looks_from = limits.looks_from

        def gate(request: Request) -> Response | Awaitable[Response | None] | None:
            if len(request.body) >= looks_from and (refusal := limits.refusal(request)) is not None:
                return refusal
            return guard(request)

        if not settings.ip_limit_per_minute:
            return gate
        # Handlers have the limit around them, but for those that have a connection to themselves.
        ip_limit = IpLimit(self.broker.topics.counters, settings.ip_limit_per_minute)

        async def limited(request: Request) -> Response | None:
            refusal = await ip_limit.refusal(request)
            admitted = guard(request) if refusal is None else refusal
            return await admitted if inspect.isawaitable(admitted) else admitted

        def gate_with_limit(request: Request) -> Response | Awaitable[Response | None] | None:
            holding = request.route is not None and request.route.holds_connection
            return limited(request) if holding else gate(request)

        return gate_with_limit

    async def start(self, listening: socket.socket | None = None) -> None:
        """Serve; on a socket that is bound already, if one is given."""
        if self._sharded is not None:
            await self._sharded.join()
        else:
            await check_alone(self.broker.database)
        for broker in self.brokers:
            await broker.start()
        if self._sharded is not None:
            await self._sharded.start()
        self.recorder.start()
        self.guard.start()
        if self._login is not None:
            await self._login.start()
        if self._sqs is not None:
            self._sqs.start()
        server = await self.http.serve(
            self.settings.listen_host,
            self.port,
            reuse_port=True,
            tls=self.tls.context if self.tls else None,
            listening=listening,
        )
        if self.settings.stats_cache_ms:
            for keep_warm in self._keeping_warm:
                self._warming.append(task := BackgroundTask())
                task.start(keep_warm())
        if self.tls is not None:
            self.tls.start()
        self.port = server.sockets[0].getsockname()[1]
        self.recorder.port = self.port
        self.http.shutting_down.append(self.live.close)
        for broker in self.brokers:
            self.http.shutting_down.append(broker.popper.release_parked)
            self.http.shutting_down.append(broker.topics.dequeuer.release_parked)
            self.http.shutting_down.append(broker.topics.multi_dequeuer.release_parked)

    async def stop(self) -> None:
        self.api.stopping = True
        # Load balancers see the failing readiness probe while requests are still answered.
        await asyncio.sleep(self.settings.shutdown_delay_ms / 1000)
        await asyncio.gather(self.consumers.shutdown(), self.http.shutdown(_GRACE_SECONDS))
        await self.live.stop()
        for task in self._warming:
            await task.stop()
        await self.guard.stop()
        if self._login is not None:
            await self._login.stop()
        if self._sqs is not None:
            await self._sqs.stop()
        if self.tls is not None:
            await self.tls.stop()
        await self.recorder.stop()
        if self._sharded is not None:
            await self._sharded.stop()
        for broker in self.brokers:
            await broker.stop()

    def _shard(self, broker: Broker, standings: Standings) -> Shard:
        """One shard with its views. What workers have counted is kept by the first shard for all of them."""
        groups = Groups(broker.database, broker.catalog, broker.publish)
        summaries = SharedResult(groups.summaries, self.settings.stats_cache_ms / 1000)
        furthest = SharedResult(groups.furthest, self.settings.stats_cache_ms / 1000)
        self._keeping_warm += [summaries.keep_warm, furthest.keep_warm]
        return Shard(
            broker,
            Queues(broker.database, broker.catalog, broker.publish, broker.meter),
            Resources(broker.database, broker.catalog.shard, standings),
            groups,
            summaries.get,
            furthest.get,
            Seeks(broker.database, broker.catalog, groups, broker.publish),
            LogReader(broker.database, broker.catalog.shard, broker.envelope),
            Status(broker.database, History(self.broker.database, self.recorder), standings),
            History(broker.database, self.recorder),
        )

    def _metric_sources(self) -> tuple[MetricSource, ...]:
        families = HostFamilies(self.broker)
        pipelines = PipelineFamilies(self.settings.queen_data_dir)
        return (
            families.spool,
            families.shards,
            families.peers,
            families.transaction_ids,
            families.topics,
            families.topic_buffer,
            pipelines.families,
            held_families(lambda: self.http.budget),
        )

    def _scraper(self, standings: Sequence[Standings]) -> Scraper:
        """Metrics of all shards."""
        seconds = self.settings.stats_cache_ms / 1000
        lags = [
            SharedResult(Groups(broker.database, broker.catalog, broker.publish).lags, seconds)
            for broker in self.brokers
        ]
        self._keeping_warm += [one.keep_warm for one in lags]
        first, *others = [
            Scraper(
                broker.database,
                behind,
                History(broker.database, self.recorder),
                self.recorder,
                own,
                self.settings.metrics_max_queues,
            )
            for broker, behind, own in zip(self.brokers, lags, standings, strict=True)
        ]
        return ShardsScraper(first, others) if others else first


def _brokers(settings: Settings, worker_id: int, runtime_dir: Path) -> tuple[Broker, ...]:
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
    topics = _topics(base, shard)
    sharded = len(settings.database_dsns) > 1
    key_values = KeyValues(base.database, base.catalog, meter, sharded=sharded)
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
        seen=_dedup_filter(settings),
    )
    stream_queries = StreamQueries(base.database, base.catalog, base.envelope)
    stream_cycles = StreamCycles(
        base.database, base.catalog, stream_queries, push.pusher, base.leases, base.envelope, pop.popper.leases_ended
    )
    finder = MessageFinder(base.catalog, base.envelope)
    search = MessageSearch(base.database, base.catalog, base.envelope)
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
        ids=base.ids,
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
        leases=base.leases,
        acker=ack.acker,
        renewer=ack.renewer,
        releaser=ack.releaser,
        dead_letters=DeadLetters(base.database, base.catalog, base.envelope, ack.redriver),
        topics=topics,
        key_values=key_values,
        locks=Locks(base.database, key_values, base.ids, meter),
        timers=timers,
        ephemeral=Ephemeral(base.database, base.notifications, meter, longest_wait_ms=settings.max_wait_ms),
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
        traces=Traces(base.database, base.catalog, base.leases, base.envelope, worker_id),
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


def _topics(base: _Base, shard: int) -> Topics:
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
        on_down=lambda: push.spool.state.set_trouble(True),
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


def _sharded(settings: Settings, brokers: Sequence[Broker]) -> ShardedBroker | None:
    if len(brokers) == 1:
        return None
    # Loaded where there are several shards, and not in every worker.
    from queen.broker.sharding.sharded_broker import ShardedBroker

    return ShardedBroker(settings, brokers)


def _login(settings: Settings, dsn: str) -> ServerLogin:
    # Loaded where people log in, and not in every worker.
    from queen.proxy.inside import ServerLogin

    return ServerLogin(settings, dsn)


def _limits(settings: Settings) -> Limits:
    """A worker's share of the memory: three eighths for requests that arrive, a quarter for unread responses.

    The rest is for what is made of them.
    """
    spare = settings.spare_memory_bytes
    return Limits(
        connections=raise_file_limit(settings.max_connections),
        connections_per_address=settings.max_connections_per_ip,
        incoming_bytes=3 * spare // 8,
        outgoing_bytes=spare // 4,
    )


def _around(settings: Settings, tracing: Tracing | None, counters: Counters, audit: Audit) -> Around:
    """What stands around the handlers of routes: the audit log, the limit of addresses, and what watches requests."""
    limit = IpLimit(counters, settings.ip_limit_per_minute) if settings.ip_limit_per_minute else None
    slow = SlowLog(settings.log_slow_ms) if settings.log_slow_ms else None
    unpacking = Unpacking(settings)

    def around(route: Route) -> Handler:
        handler = route.handler
        if route.pattern in UNPACKED:
            handler = unpacking.around(handler)
        if is_audited(route):
            handler = audit.around(route, handler)
        if limit is not None and route.access is not Access.PUBLIC:
            handler = limit.around(handler)
        begin = tracing.watching(route) if tracing is not None else None
        if begin is not None:
            handler = watched(handler, begin)
        return watched(handler, slow.begin) if slow is not None else handler

    return around


def run_worker(
    settings: Settings,
    worker_id: int,
    runtime_dir: Path,
    on_ready: Callable[[], None] = lambda: None,
    listening: socket.socket | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish what was begun and return. `listening`: a socket that is bound."""
    # A payload may be nested deeper than Python's own code ever is.
    sys.setrecursionlimit(_RECURSION_LIMIT)
    # Requests come and go without cycles; looking for some after every 700 of them is wasted.
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    uvloop.run(_serve(settings, worker_id, runtime_dir, on_ready, listening))


async def _serve(
    settings: Settings,
    worker_id: int,
    runtime_dir: Path,
    on_ready: Callable[[], None],
    listening: socket.socket | None,
) -> None:
    stopping = asyncio.Event()
    for signum in (signals.SIGTERM, signals.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    spans = start_tracing(os.environ, worker_id)
    worker = Worker(settings, worker_id, runtime_dir, tracing=_tracing(spans) if spans is not None else None)
    await worker.start(listening)
    if worker.tls is not None:
        asyncio.get_running_loop().add_signal_handler(signals.SIGHUP, worker.tls.reload)
    on_ready()
    await stopping.wait()
    await worker.stop()
    if spans is not None:
        stop_tracing(spans, _LAST_SPANS_SECONDS)


def _tracing(spans: TracerProvider) -> Tracing:
    from queen.http.tracing import Tracing

    return Tracing(spans.get_tracer("queen", __version__))
