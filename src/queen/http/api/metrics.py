"""Metrics of this host: a little JSON, and everything for Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeAlias

from queen.http.api.view_cache import ViewCache
from queen.http.server.message import Request, Response, json_response
from queen.http.server.router import Access, Router
from queen.monitoring.recorder import Recorder
from queen.monitoring.scrape import Scraper

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Source: TypeAlias = "Callable[[], Iterable[Metric]]"
"""Gives families of metrics that something else keeps, such as the spool or the peers."""

_TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"
_UNCACHED: Final = ((b"Cache-Control", b"no-cache"),)


class MetricsRoutes:
    """Whichever worker answers, it speaks for all workers of its host."""

    def __init__(
        self, recorder: Recorder, scraper: Scraper, shared: ViewCache, sources: tuple[Source, ...] = ()
    ) -> None:
        """`sources` give further families for Prometheus."""
        self._recorder = recorder
        self._scraper = scraper
        self._shared = shared
        self._sources = sources

    def add_to(self, router: Router) -> None:
        router.add("GET", "/metrics", self._shared.of(self.metrics), Access.PUBLIC)
        router.add("GET", "/metrics/prometheus", self._shared.of(self.prometheus), Access.PUBLIC)

    async def metrics(self, request: Request) -> Response:
        reports = await self._recorder.pinned_reports()
        now = time.time()

        def last(name: str) -> float:
            return sum(report.last(name) for report in reports)

        return json_response(
            200,
            {
                "uptime": round(max(now - report.started_at for report in reports), 3),
                "requests": {
                    "total": sum(report.total.http_responses for report in reports),
                    "rate": round(sum(report.rates[0] for report in reports), 3),
                },
                "messages": {
                    "total": sum(report.total.push_messages + report.total.pop_messages for report in reports),
                    "rate": round(sum(report.rates[1] for report in reports), 3),
                },
                "database": {
                    "poolSize": int(last("pool_size")),
                    "idleConnections": int(last("pool_idle")),
                    "waitingRequests": int(last("job_queue")),
                },
                "memory": {
                    "rss": int(last("rss_bytes")),
                    # There is no heap of JavaScript here.
                    "heapTotal": 0,
                    "heapUsed": 0,
                    "external": 0,
                    "arrayBuffers": 0,
                },
                "cpu": {
                    "user": round(1e6 * sum(report.cpu_seconds[0] for report in reports)),
                    "system": round(1e6 * sum(report.cpu_seconds[1] for report in reports)),
                },
            },
        )

    async def prometheus(self, request: Request) -> Response:
        scrape = await self._scraper.scrape()
        # The library is loaded where it is scraped, and not in every worker.
        from queen.monitoring.exposition import expose

        more = [family for source in self._sources for family in source()]
        # In a thread, so that requests are served in between.
        body = await asyncio.to_thread(expose, scrape, more)
        return Response(200, body, _TEXT, _UNCACHED)
