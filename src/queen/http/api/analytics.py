"""What was counted, over time."""

from __future__ import annotations

from queen.broker.broker import Broker
from queen.http.api.params import query_name, read_range, read_worker
from queen.http.api.view_cache import ViewCache
from queen.http.server.message import Request, Response, json_response
from queen.http.server.router import Access, Router
from queen.monitoring.history import History, rollup_series
from queen.monitoring.postgres_stats import postgres_stats
from queen.monitoring.status import Status

_HOURS = 24


class AnalyticsRoutes:
    """Series of what workers have counted; without `from` and `to`, of the last day."""

    def __init__(self, broker: Broker, status: Status, history: History, shared: ViewCache) -> None:
        self._database = broker.database
        self._status = status
        self._history = history
        self._shared = shared

    def add_to(self, router: Router) -> None:
        for name, handler in (
            ("system-metrics", self.system_metrics),
            ("worker-metrics", self.worker_metrics),
            ("queue-lag", self.queue_lag),
            ("queue-ops", self.queue_operations),
            ("queue-parked-replicas", self.parked),
            ("retention", self.retention),
            ("rollup", self.rollup),
            ("postgres-stats", self.postgres_stats),
        ):
            router.add("GET", f"/api/v1/analytics/{name}", self._shared.of(handler), Access.READ_ONLY)

    async def system_metrics(self, request: Request) -> Response:
        times, (host, worker_id) = read_range(request, _HOURS), read_worker(request)
        return json_response(200, await self._history.system_metrics(times, host, worker_id))

    async def worker_metrics(self, request: Request) -> Response:
        times, (host, worker_id) = read_range(request, _HOURS), read_worker(request)
        return json_response(200, await self._status.worker_metrics(times, host, worker_id))

    async def queue_lag(self, request: Request) -> Response:
        return json_response(200, await self._history.queue_lag(read_range(request, _HOURS), _names(request)))

    async def queue_operations(self, request: Request) -> Response:
        return json_response(200, await self._history.queue_operations(read_range(request, _HOURS), _names(request)))

    async def parked(self, request: Request) -> Response:
        return json_response(200, await self._history.parked(read_range(request, _HOURS), _names(request)))

    async def retention(self, request: Request) -> Response:
        times, queue = read_range(request, _HOURS), query_name(request, "queue")
        return json_response(200, await self._history.retention(times, queue))

    async def rollup(self, request: Request) -> Response:
        times, queue, group = read_range(request, _HOURS), query_name(request, "queue"), query_name(request, "group")
        return json_response(200, await rollup_series(self._database, times, queue, group))

    async def postgres_stats(self, request: Request) -> Response:
        return json_response(200, await postgres_stats(self._database))


def _names(request: Request) -> list[str] | None:
    """The queue that is asked for; None: all of them."""
    queue = query_name(request, "queue")
    return [queue] if queue else None
