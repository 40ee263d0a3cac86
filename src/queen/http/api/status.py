"""How the whole is, and how queues are."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from queen.broker.broker import Broker
from queen.broker.inspect.browse import MessageFilter
from queen.broker.inspect.resources import Resources
from queen.errors import BadRequest
from queen.http.api.params import path_name, query_name, read_page, read_range
from queen.http.api.view_cache import ViewCache
from queen.http.server.message import Request, Response, json_response
from queen.http.server.router import Access, Router
from queen.monitoring.status import QueueFilter, Status
from queen.wire.times import iso_millis

_QUEUE: Final = "/api/v1/status/queues/{queue}"
_INTERVALS: Final = {"minute": 60, "hour": 3600, "day": 86_400}
_MOST_POINTS: Final = 10_000
_EVER: Final = datetime.min.replace(tzinfo=UTC)
_LISTED: Final = ("id", "transactionId", "partitionId", "queuePath", "queue", "partition", "status", "createdAt")


class StatusRoutes:
    """Views that dashboards ask for again and again."""

    def __init__(self, broker: Broker, status: Status, shared: ViewCache) -> None:
        self._status = status
        self._shared = shared
        self._resources = Resources(broker.database, broker.catalog.shard)
        self._browser = broker.message_browser

    def add_to(self, router: Router) -> None:
        read, shared = Access.READ_ONLY, self._shared.of
        router.add("GET", "/api/v1/resources/overview", shared(self.overview), read)
        router.add("GET", "/api/v1/status", shared(self.status), read)
        router.add("GET", "/api/v1/status/queues", shared(self.queues), read)
        router.add("GET", _QUEUE, shared(self.queue), read)
        router.add("GET", f"{_QUEUE}/messages", shared(self.messages), read)
        router.add("GET", "/api/v1/status/analytics", shared(self.analytics), read)

    async def overview(self, request: Request) -> Response:
        return json_response(200, await self._status.overview())

    async def status(self, request: Request) -> Response:
        return json_response(200, await self._status.status(read_range(request, hours=1), _wanted(request)))

    async def queues(self, request: Request) -> Response:
        """A page of the queues, newest first. Here `pending` includes what is being processed."""
        namespace, task = query_name(request, "namespace"), query_name(request, "task")
        limit, offset = read_page(request, 100)
        return json_response(
            200,
            {
                "queues": await self._resources.queues(namespace, task, limit, offset, with_processing=True),
                "pagination": {
                    "limit": limit,
                    "offset": offset,
                    "total": await self._resources.queue_count(namespace, task),
                },
            },
        )

    async def queue(self, request: Request) -> Response:
        return json_response(200, await self._resources.queue_status(path_name(request, "queue")))

    async def messages(self, request: Request) -> Response:
        """A page of the messages of a queue, newest first."""
        limit, offset = read_page(request, 50)
        name = path_name(request, "queue")
        await self._resources.check_exists(name)
        page = await self._browser.page(MessageFilter(queue=name, since=_EVER), limit, offset)
        return json_response(200, [{key: message[key] for key in _LISTED} for message in page["messages"]])

    async def analytics(self, request: Request) -> Response:
        """How many of the messages that are still stored came in each minute, hour or day."""
        interval = request.query.get("interval", "") or "hour"
        seconds = _INTERVALS.get(interval)
        if seconds is None:
            raise BadRequest(f"interval must be one of {', '.join(_INTERVALS)}, not {interval!r}")
        times = read_range(request, hours=24)
        points = (times.until - times.since).total_seconds() / seconds
        if points > _MOST_POINTS:
            raise BadRequest(
                f"from and to are {points:.0f} times interval={interval} apart, more than {_MOST_POINTS}:"
                " ask for a shorter time or a longer interval"
            )
        return json_response(
            200,
            {
                "dataPoints": await self._status.stored_by_time(times, seconds, _wanted(request)),
                "interval": interval,
                "from": iso_millis(times.since),
                "to": iso_millis(times.until),
            },
        )


def _wanted(request: Request) -> QueueFilter:
    return QueueFilter(*(query_name(request, key) for key in ("queue", "namespace", "task")))
