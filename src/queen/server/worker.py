"""One worker process: its brokers, the HTTP server in front of them, their start and stop."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal as signals
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from queen import __version__
from queen.broker.broker import Broker
from queen.broker.inspect.groups import Groups
from queen.broker.inspect.log_reader import LogReader
from queen.broker.inspect.queue_stats import QueueStats
from queen.broker.inspect.resources import Resources
from queen.broker.inspect.seeks import Seeks
from queen.broker.maintenance.database_copy import DatabaseCopy
from queen.broker.queues import Queues
from queen.concurrency import BackgroundTask
from queen.dashboard import Dashboard
from queen.http.api.limits import UNPACKED, RequestLimits, Unpacking
from queen.http.api.table import add_routes
from queen.http.auth.audit import Audit, is_audited
from queen.http.auth.browser import BrowserRules
from queen.http.auth.forwarded import behind_proxies
from queen.http.auth.guard import Guard, server_tls
from queen.http.auth.ip_limit import IpLimit
from queen.http.auth.lookup import BrokerLookup
from queen.http.consume.consumers import Consumers
from queen.http.routing.context import Api, MetricSource, Shard
from queen.http.routing.view_cache import HostViewCache
from queen.http.server.handshakes import MOST_HANDSHAKES
from queen.http.server.limits import Limits, raise_file_limit
from queen.http.server.message import Access, Handler, Request, Response, Route
from queen.http.server.observe import SlowLog, watched
from queen.http.server.protocol import Gate, HttpServer
from queen.http.server.router import Around, Router
from queen.metrics.report import SnapshotStore
from queen.monitoring.families import HostFamilies, PipelineFamilies
from queen.monitoring.history import History
from queen.monitoring.live import LiveFeed
from queen.monitoring.recorder import HttpStats, Recorder
from queen.monitoring.scrape import Scraper, ShardsScraper
from queen.monitoring.status import Status
from queen.redis.interfaces import Counters
from queen.server.brokers import make_brokers
from queen.settings import Settings
from queen.single_flight import SharedResult, SingleFlightCache
from queen.storage.shard_setup import check_alone
from queen.telemetry import start_tracing, stop_tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from prometheus_client.core import Metric

    from queen.broker.sharding.shard_router import ShardRouter
    from queen.broker.sharding.sharded_broker import ShardedBroker
    from queen.http.sqs.endpoint import SqsEndpoint
    from queen.http.tracing import Tracing
    from queen.proxy.server_login import ServerLogin

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
        self.brokers = make_brokers(settings, worker_id, runtime_dir)
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
            gate=behind_proxies(self._gate(settings), settings.trusted_proxies),
            header_lines=browsers.header_lines,
            lines_for=browsers.cors_lines,
            admits_host=browsers.is_host_admitted,
            check_head=behind_proxies(self.guard.check_head, settings.trusted_proxies),
            limits=_limits(settings),
            max_body_bytes=settings.body_bytes,
        )
        for broker in self.brokers:
            broker.popper.is_flooded = self._is_flooded
            broker.topics.dequeuer.is_flooded = self._is_flooded
            broker.topics.multi_dequeuer.is_flooded = self._is_flooded
        self.broker.meter.sources.append(self._refusals)
        self.recorder = Recorder(
            self.broker,
            SnapshotStore(runtime_dir, worker_id, settings.num_workers),
            socket.gethostname(),
            HttpStats(self.http.statuses, self.http.in_flight, self.http.open_connections),
        )
        queue_stats = [QueueStats(broker.database, settings.stats_cache_ms / 1000) for broker in self.brokers]
        self._keeping_warm = [one.keep_warm for one in queue_stats]
        self._warming: list[BackgroundTask] = []
        self.live = LiveFeed(
            self.brokers,
            self.recorder,
            queue_stats,
            self._sharded.directory.changed if self._sharded is not None else None,
        )
        self.api = Api(
            settings,
            front,
            self.brokers,
            self.recorder,
            self._scraper(queue_stats),
            self._metric_sources(),
            self.consumers,
            self.live,
            DatabaseCopy(self.broker.database, settings.database_dsns[0]),
            lambda: self.guard.problem,
            keep_bodies=tracing is not None,
        )
        if self._sharded is not None:
            self.api.moves = self._sharded.moves
        router.fallback = Dashboard(wants_token=settings.jwt_enabled)
        self._login = _login(settings, settings.database_dsns[0]) if settings.queen_login else None
        if self._login is not None:
            router.fallback = self._login.before(router.fallback)
            self.guard.sessions = self._login
        host_cache = HostViewCache(runtime_dir) if settings.num_workers > 1 else None
        shards = [self._shard(broker, some) for broker, some in zip(self.brokers, queue_stats, strict=True)]
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

        most = self.settings.ip_limit_per_minute
        return SqsEndpoint(
            self.settings,
            self.api.broker,
            shards,
            router,
            audit,
            self.guard.refused,
            self.guard.browsers,
            # Its routes are public because it authenticates requests itself.
            IpLimit(self.broker.topics.counters, most).around if most else lambda handler: handler,
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

        async def counted(request: Request, answer: Response | Awaitable[Response | None]) -> Response | None:
            refusal = answer if isinstance(answer, Response) else await answer
            # Guessing is limited, too: no handler counts what is refused here.
            return refusal if refusal is None else await ip_limit.refusal(request) or refusal

        def gate_with_limit(request: Request) -> Response | Awaitable[Response | None] | None:
            if request.route is not None and request.route.holds_connection:
                return limited(request)
            answer = gate(request)
            return answer if answer is None else counted(request, answer)

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
        await self.api.database_copy.stop()
        await self.recorder.stop()
        if self._sharded is not None:
            await self._sharded.stop()
        for broker in self.brokers:
            await broker.stop()

    def _shard(self, broker: Broker, queue_stats: QueueStats) -> Shard:
        """One shard with its views. What workers have counted is kept by the first shard for all of them."""
        kept_seconds = self.settings.stats_cache_ms / 1000
        groups = Groups(broker.database, broker.catalog, broker.publish, kept_seconds)
        summaries = SharedResult(groups.summaries, kept_seconds)
        furthest = SharedResult(groups.furthest, kept_seconds)
        self._keeping_warm += [summaries.keep_warm, furthest.keep_warm]
        return Shard(
            broker,
            Queues(broker.database, broker.catalog, broker.publish, broker.meter),
            Resources(broker.database, queue_stats, summaries.get),
            groups,
            summaries.get,
            furthest.get,
            Seeks(broker.database, broker.catalog, groups, broker.publish),
            LogReader(broker.database, broker.envelope),
            Status(broker.database, History(self.broker.database, self.recorder), queue_stats),
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
            self._held_bytes,
        )

    def _refusals(self) -> dict[str, int]:
        """Requests and connections that were refused before a handler saw them, by reason."""
        by_sender = {f"auth\n{reason}\n": count for reason, count in self.guard.refused.items()}
        return by_sender | {f"limit\n{what}\n": count for what, count in self.http.budget.refused.items()}

    def _held_bytes(self) -> Iterable[Metric]:
        """What clients hold of the memory of the worker that answers."""
        from prometheus_client.core import GaugeMetricFamily

        held = GaugeMetricFamily(
            "queen_http_held_bytes",
            "Bytes of requests being received or queued, and of responses that clients have not read.",
            labels=("side",),
        )
        held.add_metric(("incoming",), self.http.budget.incoming)
        held.add_metric(("outgoing",), self.http.budget.outgoing)
        yield held

    def _scraper(self, queue_stats: Sequence[QueueStats]) -> Scraper:
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
            for broker, behind, own in zip(self.brokers, lags, queue_stats, strict=True)
        ]
        return ShardsScraper(first, others) if others else first


def _sharded(settings: Settings, brokers: Sequence[Broker]) -> ShardedBroker | None:
    if len(brokers) == 1:
        return None
    # Loaded where there are several shards, and not in every worker.
    from queen.broker.sharding.sharded_broker import ShardedBroker

    return ShardedBroker(settings, brokers)


def _login(settings: Settings, dsn: str) -> ServerLogin:
    # Loaded where people log in, and not in every worker.
    from queen.proxy.server_login import ServerLogin

    return ServerLogin(settings, dsn)


def _limits(settings: Settings) -> Limits:
    """A worker's share of the memory: three eighths for requests that arrive, a quarter for unread responses.

    The rest is for what is made of them.
    """
    spare = settings.spare_memory_bytes
    return Limits(
        connections=raise_file_limit(settings.max_connections, MOST_HANDSHAKES if settings.tls_cert else 0),
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
    # Requests leave no reference cycles; collecting after every 700 allocations is wasted.
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
