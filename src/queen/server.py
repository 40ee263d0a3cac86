"""The composition root: one worker process, wired."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from queen import __version__
from queen.broker.broker import Broker
from queen.broker.inspect.groups import Groups
from queen.bus.peers import ShardPeers
from queen.concurrency import SingleFlightCache
from queen.http.api.analytics import AnalyticsRoutes
from queen.http.api.cluster import ClusterRoutes
from queen.http.api.consume import ConsumeRoutes
from queen.http.api.dead_letters import DeadLetterRoutes
from queen.http.api.groups import GroupRoutes
from queen.http.api.health import HealthRoutes
from queen.http.api.maintenance import MaintenanceRoutes
from queen.http.api.messages import MessageRoutes
from queen.http.api.messaging import MessagingRoutes
from queen.http.api.metrics import MetricsRoutes
from queen.http.api.openapi import OpenApiRoutes
from queen.http.api.queues import QueueRoutes
from queen.http.api.reading import ReadingRoutes
from queen.http.api.stages import StageRoutes
from queen.http.api.status import StatusRoutes
from queen.http.api.streams import StreamRoutes
from queen.http.api.topics import TopicRoutes
from queen.http.api.traces import TraceRoutes
from queen.http.api.view_cache import HostViewCache, ViewCache
from queen.http.auth.ip_limit import IpLimit
from queen.http.placement.front import Front, Routes
from queen.http.placement.health import ShardsHealth
from queen.http.server.observe import SlowLog, watched
from queen.http.server.protocol import Shell
from queen.http.server.router import Access, Around, Handler, Route, Router
from queen.metrics.meter import Meter
from queen.metrics.report import SnapshotStore
from queen.monitoring.families import HostFamilies, PipelineFamilies
from queen.monitoring.history import History
from queen.monitoring.recorder import Recorder, ShellView
from queen.monitoring.scrape import Scraper, ShardsScraper
from queen.monitoring.status import Status
from queen.redis.interfaces import Counters
from queen.settings import Settings
from queen.storage.database import Record
from queen.storage.shard_setup import check_alone
from queen.telemetry import start_tracing, stop_tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from queen.http.tracing import Tracing

_GRACE_SECONDS = 8.0
_LAST_SPANS_SECONDS = 1.5
_RECURSION_LIMIT = 20_000


class Worker:
    """A broker and the HTTP shell in front of it. Several may live in one process, as they do in tests."""

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
        self._front = Front(settings, self.brokers) if len(self.brokers) > 1 else None
        self.consume = ConsumeRoutes(self._front.consuming if self._front is not None else self.broker)
        router = Router(around=_around(settings, tracing, self.broker.topics.counters))
        self._health = (
            ShardsHealth(self.brokers)
            if self._front is not None
            else HealthRoutes(self.broker, lambda: self.broker.spool.writer.healthy)
        )
        self.shell = Shell(router, max_body_bytes=settings.max_body_bytes)
        self.recorder = Recorder(
            self.broker,
            SnapshotStore(runtime_dir, worker_id, settings.num_workers),
            socket.gethostname(),
            ShellView(self.shell.statuses, self.shell.in_flight),
        )
        for own in (self._health, OpenApiRoutes(router.routes), self.consume):
            own.add_to(router)
        cache_seconds = settings.stats_cache_ms / 1000
        if self._front is not None:
            self._front.add_to(
                router, lambda broker: self._routes_of(broker, ViewCache(cache_seconds), keep_bodies=True)
            )
        else:
            host_answers = HostViewCache(runtime_dir) if settings.num_workers > 1 else None
            shared = ViewCache(cache_seconds, host_answers)
            for routes in self._routes_of(self.broker, shared, keep_bodies=tracing is not None):
                routes.add_to(router)
        self.port = settings.port if port is None else port

    async def start(self) -> None:
        if self._front is not None:
            await self._front.join()
        else:
            await check_alone(self.broker.database)
        for broker in self.brokers:
            await broker.start()
        if self._front is not None:
            await self._front.start()
        self.recorder.start()
        server = await self.shell.serve(self.settings.host, self.port, reuse_port=True)
        self.port = server.sockets[0].getsockname()[1]
        self.recorder.port = self.port
        for broker in self.brokers:
            self.shell.shutting_down.append(broker.popper.release_parked)
            self.shell.shutting_down.append(broker.topics.dequeuer.release_parked)
            self.shell.shutting_down.append(broker.topics.many.release_parked)

    async def stop(self) -> None:
        self._health.stopping = True
        # Whoever sends requests here is to hear of it while they are still answered.
        await asyncio.sleep(self.settings.shutdown_delay_ms / 1000)
        await asyncio.gather(self.consume.shutdown(), self.shell.shutdown(_GRACE_SECONDS))
        await self.recorder.stop()
        if self._front is not None:
            await self._front.stop()
        for broker in self.brokers:
            await broker.stop()

    def _routes_of(self, broker: Broker, shared: ViewCache, *, keep_bodies: bool) -> tuple[Routes, ...]:
        """Everything that can be asked of one shard."""
        return (
            MessagingRoutes(broker, keep_bodies=keep_bodies),
            QueueRoutes(broker, shared),
            GroupRoutes(broker, shared),
            MessageRoutes(broker),
            ReadingRoutes(broker),
            DeadLetterRoutes(broker),
            TraceRoutes(broker),
            ClusterRoutes(broker),
            MaintenanceRoutes(broker),
            *self._watching_routes(broker, shared),
            StreamRoutes(broker),
            StageRoutes(broker),
            TopicRoutes(broker),
        )

    def _watching_routes(
        self, broker: Broker, shared: ViewCache
    ) -> tuple[StatusRoutes, AnalyticsRoutes, MetricsRoutes]:
        """The views of how it goes. What was counted is kept by the first shard for all of them."""
        families = HostFamilies(broker)
        standings = self._standings(broker)
        status = Status(broker.database, History(self.broker.database, self.recorder), standings)
        pipelines = PipelineFamilies(self.settings.queen_data_dir)
        sources = (
            families.spool,
            families.shards,
            families.peers,
            families.transaction_ids,
            families.topics,
            families.topic_buffer,
            pipelines.families,
        )
        return (
            StatusRoutes(broker, status, shared),
            AnalyticsRoutes(broker, status, History(broker.database, self.recorder), shared),
            MetricsRoutes(self.recorder, self._scraper(broker, standings), shared, sources=sources),
        )

    def _scraper(self, broker: Broker, standings: SingleFlightCache[list[Record]]) -> Scraper:
        """Of all shards, whichever is asked."""
        first, *others = [
            Scraper(
                one.database,
                Groups(one.database, one.catalog, one.publish),
                History(one.database, self.recorder),
                self.recorder,
                standings if one is broker else self._standings(one),
                self.settings.metrics_max_queues,
            )
            for one in self.brokers
        ]
        return ShardsScraper(first, others) if others else first

    def _standings(self, broker: Broker) -> SingleFlightCache[list[Record]]:
        seconds = self.settings.stats_cache_ms / 1000
        return SingleFlightCache(partial(broker.database.fetch, "queue_standings", "", "", ""), seconds)


def _brokers(settings: Settings, worker_id: int, runtime_dir: Path) -> tuple[Broker, ...]:
    """One for each shard. The first has the places that a server with one shard has; memory is divided among them."""
    dsns, meter = settings.database_dsns, Meter()
    if len(dsns) == 1:
        return (Broker(settings, dsns[0], worker_id, runtime_dir, meter),)
    shared = dataclasses.replace(
        settings,
        segment_cache_mb=max(1, settings.segment_cache_mb // len(dsns)),
        dedup_memory_mb=max(1, settings.dedup_memory_mb // len(dsns)),
        dedup_disk_mb=settings.dedup_disk_mb // len(dsns),
    )
    brokers = [Broker(shared, dsns[0], worker_id, runtime_dir, meter)]
    for number, dsn in enumerate(dsns[1:], start=1):
        place = runtime_dir / f"shard-{number}"
        place.mkdir(parents=True, exist_ok=True)
        own = dataclasses.replace(
            shared,
            file_buffer_dir=str(settings.spool_dir / f"shard-{number}"),
            wal_dir=str(settings.wal_path / f"shard-{number}"),
        )
        peers = ShardPeers(own, place, brokers[0].peers, number)
        brokers.append(Broker(own, dsn, worker_id, place, meter, peers, shard=number))
    return tuple(brokers)


def _around(settings: Settings, tracing: Tracing | None, counters: Counters) -> Around | None:
    """Who watches requests, or limits them; None when nobody does."""
    if not settings.log_slow_ms and tracing is None and not settings.ip_limit_per_minute:
        return None
    limit = IpLimit(counters, settings.ip_limit_per_minute) if settings.ip_limit_per_minute else None
    slow = SlowLog(settings.log_slow_ms) if settings.log_slow_ms else None

    def around(route: Route) -> Handler:
        handler = route.handler
        if limit is not None and route.access is not Access.PUBLIC:
            handler = limit.around(handler)
        begin = tracing.watching(route) if tracing is not None else None
        if begin is not None:
            handler = watched(handler, begin)
        return watched(handler, slow.begin) if slow is not None else handler

    return around


def run_worker(
    settings: Settings, worker_id: int, runtime_dir: Path, on_ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM or SIGINT, then finish what was begun and return."""
    # A payload may be nested deeper than Python's own code ever is.
    sys.setrecursionlimit(_RECURSION_LIMIT)
    # Requests come and go without cycles; looking for some after every 700 of them is wasted.
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    uvloop.run(_serve(settings, worker_id, runtime_dir, on_ready))


async def _serve(settings: Settings, worker_id: int, runtime_dir: Path, on_ready: Callable[[], None]) -> None:
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    spans = start_tracing(os.environ, worker_id)
    worker = Worker(settings, worker_id, runtime_dir, tracing=_tracing(spans) if spans is not None else None)
    await worker.start()
    on_ready()
    await stopping.wait()
    await worker.stop()
    if spans is not None:
        stop_tracing(spans, _LAST_SPANS_SECONDS)


def _tracing(spans: TracerProvider) -> Tracing:
    from queen.http.tracing import Tracing

    return Tracing(spans.get_tracer("queen", __version__))
