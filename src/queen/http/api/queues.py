"""Queues: configure, delete, clear; and the views of what there is."""

from __future__ import annotations

from typing import Any

from queen.broker.broker import Broker
from queen.broker.inspect.resources import Resources
from queen.broker.queues import Queues, echo_options, read_options
from queen.errors import BadRequest
from queen.http.api.params import MOST_ON_A_PAGE, path_name, query_name, read_page
from queen.http.api.view_cache import ViewCache
from queen.http.server.message import Request, Response, json_response
from queen.http.server.router import Access, Router
from queen.wire.ack import decode_object
from queen.wire.push import check_name


class QueueRoutes:
    """The routes that change queues as a whole, and those that show what there is."""

    def __init__(self, broker: Broker, shared: ViewCache) -> None:
        self._shared = shared
        self._queues = Queues(broker.database, broker.catalog, broker.publish, broker.meter)
        self._resources = Resources(broker.database, broker.catalog.shard)

    def add_to(self, router: Router) -> None:
        read, write, admin, shared = Access.READ_ONLY, Access.READ_WRITE, Access.ADMIN, self._shared.of
        router.add("POST", "/api/v1/configure", self.configure, write)
        router.add("DELETE", "/api/v1/resources/queues/{queue}", self.delete, admin)
        router.add("DELETE", "/api/v1/queues/{queue}/clear", self.clear, admin)
        router.add("GET", "/api/v1/resources/queues", shared(self.queues), read)
        router.add("GET", "/api/v1/resources/queues/{queue}", self.queue, read)
        router.add("GET", "/api/v1/resources/partitions", self.partitions, read)
        router.add("GET", "/api/v1/resources/namespaces", shared(self.namespaces), read)
        router.add("GET", "/api/v1/resources/tasks", shared(self.tasks), read)
        router.add("POST", "/api/v1/stats/refresh", self.refresh, admin)

    async def configure(self, request: Request) -> Response:
        """Make a queue or replace all its options: what is not sent gets its default."""
        body = decode_object(request.body)
        name = body.get("queue")
        if not isinstance(name, str) or not name:
            raise BadRequest("queue is required")
        check_name(name, "Queue", "queue")
        namespace, task = _label(body, "namespace"), _label(body, "task")
        configured = await self._queues.configure(name, namespace, task, read_options(body.get("options")))
        return json_response(
            200,
            {
                "configured": True,
                "queueId": str(configured.queue.public_id),
                "partitionId": configured.partition_id,
                "queue": name,
                "namespace": namespace,
                "task": task,
                "options": echo_options(configured.queue),
            },
        )

    async def delete(self, request: Request) -> Response:
        name = path_name(request, "queue")
        existed = await self._queues.delete(name)
        return json_response(200, {"deleted": True, "queue": name, "existed": existed})

    async def clear(self, request: Request) -> Response:
        """Remove all messages of a queue, or of one partition (`?partition=`); its options stay."""
        name, partition = path_name(request, "queue"), query_name(request, "partition") or None
        messages = await self._queues.clear(name, partition)
        return json_response(200, {"cleared": True, "queue": name, "partition": partition, "messages": messages})

    async def queues(self, request: Request) -> Response:
        """All queues, or a page of them when `limit` or `offset` is sent, filtered by `namespace` and `task`."""
        namespace, task = query_name(request, "namespace"), query_name(request, "task")
        if not request.query.keys() & {"limit", "offset"}:
            return json_response(200, {"queues": await self._resources.queues(namespace, task)})
        limit, offset = read_page(request, MOST_ON_A_PAGE)
        return json_response(
            200,
            {
                "queues": await self._resources.queues(namespace, task, limit, offset),
                "total": await self._resources.queue_count(namespace, task),
                "pagination": {"limit": limit, "offset": offset},
            },
        )

    async def queue(self, request: Request) -> Response:
        return json_response(200, await self._resources.queue(path_name(request, "queue")))

    async def partitions(self, request: Request) -> Response:
        """A page of the partitions of a queue (`?queue=`), or of all queues."""
        limit, offset = read_page(request, MOST_ON_A_PAGE)
        partitions, total = await self._resources.partitions(query_name(request, "queue"), limit, offset)
        return json_response(
            200, {"partitions": partitions, "total": total, "pagination": {"limit": limit, "offset": offset}}
        )

    async def namespaces(self, request: Request) -> Response:
        return json_response(200, {"namespaces": await self._resources.labels("namespace")})

    async def tasks(self, request: Request) -> Response:
        return json_response(200, {"tasks": await self._resources.labels("task")})

    async def refresh(self, request: Request) -> Response:
        """Numbers are always read live, so all that is left to do is to say of how many things they are."""
        counts = await self._resources.counts()
        return json_response(
            200,
            {
                "partition": {"partitionsUpdated": counts["partitions"]},
                "queue": {"queuesUpdated": counts["queues"]},
                "namespace": {"namespacesUpdated": counts["namespaces"]},
                "task": {"tasksUpdated": counts["tasks"]},
                "system": {"systemUpdated": 1},
                "cleanup": {},
            },
        )


def _label(body: dict[str, Any], key: str) -> str:
    """A namespace or task: text; null and nothing mean none."""
    value = body.get(key)
    if value is None or value == "":
        return ""
    if not isinstance(value, str):
        raise BadRequest(f"{key} must be a string (at {key})")
    check_name(value, key.capitalize(), key)
    return value
