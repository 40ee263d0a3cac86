"""Metrics of this host: a little JSON, and everything for Prometheus."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from queen.http.routing.call import Call
from queen.http.routing.context import Api
from queen.http.routing.route import Media, RouteTable
from queen.http.server.message import Access, Response
from queen.wire.api.monitoring.metrics import Connections, CpuUse, HostMetrics, MemoryUse, Rate

routes = RouteTable("Status")

_TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"
_UNCACHED: Final = ((b"Cache-Control", b"no-cache"),)


@routes.on_worker(
    "GET",
    "/metrics",
    access=Access.PUBLIC,
    summary="Metrics of this host in short",
    returns={200: HostMetrics},
    cached=True,
)
async def metrics(api: Api, call: Call[None, None]) -> HostMetrics:
    reports = await api.recorder.published_reports()
    now = time.time()

    def last(name: str) -> int:
        return int(sum(report.last(name) for report in reports))

    return HostMetrics(
        round(max(now - report.started_at for report in reports), 3),
        Rate(
            sum(report.total.http_responses for report in reports), round(sum(report.rates[0] for report in reports), 3)
        ),
        Rate(
            sum(report.total.push_messages + report.total.pop_messages for report in reports),
            round(sum(report.rates[1] for report in reports), 3),
        ),
        Connections(last("pool_size"), last("pool_idle"), last("job_queue")),
        # There is no JavaScript heap here.
        MemoryUse(last("rss_bytes"), 0, 0, 0, 0),
        CpuUse(
            round(1e6 * sum(report.cpu_seconds[0] for report in reports)),
            round(1e6 * sum(report.cpu_seconds[1] for report in reports)),
        ),
    )


@routes.on_worker(
    "GET",
    "/metrics/prometheus",
    access=Access.PUBLIC,
    summary="All metrics, for Prometheus",
    description="Whichever worker answers, the metrics are of all workers of its host.",
    returns={200: Media("text/plain")},
    cached=True,
)
async def prometheus(api: Api, call: Call[None, None]) -> Response:
    scrape = await api.scraper.scrape()
    # The library is loaded where it is scraped, and not in every worker.
    from queen.monitoring.exposition import expose

    more = [family for source in api.metric_sources for family in source()]
    # In a thread, so that requests are served in between.
    body = await asyncio.to_thread(expose, scrape, more)
    return Response(200, body, _TEXT, _UNCACHED)
