"""For every route, how a request finds its shards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec

from queen.broker.broker import Broker
from queen.broker.sharding.namespace_rules import NamespaceRules
from queen.errors import BadRequest
from queen.http.api.params import MOST_ON_A_PAGE
from queen.http.placement import views
from queen.http.placement.batches import Batches, partition_number
from queen.http.placement.calls import Calls, Handlers, call
from queen.http.placement.many import ManyTopics
from queen.http.placement.merging import Json, Merging, in_order, labelled, summed
from queen.http.placement.stages import StagePlacement
from queen.http.placement.waiting import Waiting
from queen.http.placement.wholes import Wholes
from queen.http.server.message import Request, Response, json_response
from queen.wire.ack import decode_object, optional_str
from queen.wire.ids import is_uuid, parse_lease
from queen.wire.shards import Name
from queen.wire.topics import decode_configure, decode_quota, decode_topic

Placer: TypeAlias = Callable[[Handlers, Request], Awaitable[Response]]

_TOPICS: Final = "/api/v1/topics"


class Placement:
    """The table: `placers` by method and pattern. What is not in it is served by shard 0."""

    def __init__(self, calls: Calls, rules: NamespaceRules, brokers: Sequence[Broker]) -> None:
        self._calls = calls
        self._directory = calls.directory
        self._batches = Batches(calls, rules)
        self._wholes = Wholes(calls, rules)
        self._stages = StagePlacement(calls)
        self._waiting = Waiting(calls, brokers)
        self._many = ManyTopics(calls, brokers)
        self._merging = Merging(calls)
        self.placers: Mapping[str, Placer] = {
            **self._messaging(),
            **self._resources(),
            **self._single_messages(),
            **self._watching(),
            **self._of_topics(),
        }

    def handler(self, method: str, pattern: str, handlers: Handlers) -> Callable[[Request], Awaitable[Response]]:
        """What serves a route in front of all shards."""
        placer = self.placers.get(f"{method} {pattern}", self._first)
        return partial(placer, handlers)

    def _messaging(self) -> dict[str, Placer]:
        return {
            "POST /api/v1/push": self._batches.push,
            "GET /api/v1/pop": self._waiting.anywhere,
            "GET /api/v1/pop/queue/{queue}": self._pop,
            "GET /api/v1/pop/queue/{queue}/partition/{partition}": self._pop,
            "POST /api/v1/ack": self._batches.ack,
            "POST /api/v1/ack/batch": self._batches.ack_batch,
            "POST /api/v1/transaction": self._wholes.transaction,
            "POST /api/v1/lease/{lease}/extend": self._extend,
            "POST /streams/v1/queries": self._wholes.register,
            "POST /streams/v1/cycle": self._wholes.cycle,
            "POST /streams/v1/state/get": self._wholes.state,
            "POST /api/v1/stages": self._stages.stage,
            "POST /api/v1/stages/publish": self._stages.publish,
            "POST /api/v1/stages/abandon": self._stages.abandon,
            "POST /internal/api/notify": self._queue_in_body,
        }

    def _resources(self) -> dict[str, Placer]:
        group = "/api/v1/consumer-groups/{group}"
        queue = f"{group}/queues/{{queue}}"
        return {
            "POST /api/v1/configure": self._queue_in_body,
            "DELETE /api/v1/resources/queues/{queue}": self._queue_in_path,
            "DELETE /api/v1/queues/{queue}/clear": self._queue_in_path,
            "GET /api/v1/resources/queues": self._queues,
            "GET /api/v1/resources/queues/{queue}": self._queue_in_path,
            "GET /api/v1/read/{queue}": self._queue_in_path,
            "GET /api/v1/read/{queue}/partition/{partition}": self._queue_in_path,
            "GET /api/v1/resources/partitions": self._paged(
                "partitions", lambda one: (one["queue"], one["name"]), MOST_ON_A_PAGE, newest=False
            ),
            "GET /api/v1/resources/namespaces": self._merged(labelled("namespaces", "namespace")),
            "GET /api/v1/resources/tasks": self._merged(labelled("tasks", "task")),
            "POST /api/v1/stats/refresh": self._merged(summed),
            "GET /api/v1/consumer-groups": self._merged(
                lambda answers: sorted(summed(answers), key=lambda one: (one["name"], one["queueName"]))
            ),
            "GET /api/v1/consumer-groups/lagging": self._paged(
                "", lambda one: one["time_lag_seconds"], MOST_ON_A_PAGE, newest=True
            ),
            f"GET {group}": self._merged(lambda answers: dict(sorted(summed(answers).items()))),
            f"DELETE {group}": self._changed(_of_group),
            f"DELETE {queue}": self._queue_in_path,
            f"POST {group}/subscription": self._changed(_of_group),
            f"POST {queue}/seek": self._queue_in_path,
            f"POST {queue}/partitions/{{partition}}/seek": self._queue_in_path,
        }

    def _single_messages(self) -> dict[str, Placer]:
        one = "/api/v1/messages/{partition}/{transaction}"
        return {
            "GET /api/v1/read/{queue}": self._queue_in_path,
            "GET /api/v1/read/{queue}/segments": self._queue_in_path,
            "GET /api/v1/messages": self._paged("messages", lambda message: message["createdAt"], 200),
            f"GET {one}": self._partition_in_path,
            f"DELETE {one}": self._partition_in_path,
            f"POST {one}/retry": self._partition_in_path,
            f"POST {one}/dlq": self._partition_in_path,
            "GET /api/v1/dlq": self._paged("messages", lambda letter: letter["failedAt"], 100),
            "POST /api/v1/dlq/retry": self._queue_in_body,
            "DELETE /api/v1/dlq": self._queue_in_body_or_query,
            "POST /api/v1/traces": self._partition_in_body,
            "GET /api/v1/traces/names": self._paged("trace_names", lambda one: one["last_seen"], 50),
            "GET /api/v1/traces/by-name/{name}": self._paged(
                "traces", lambda one: one["created_at"], 100, newest=False
            ),
            "GET /api/v1/traces/{partition}/{transaction}": self._partition_in_path,
        }

    def _watching(self) -> dict[str, Placer]:
        return {
            "GET /api/v1/system/maintenance": self._merged(views.modes),
            "POST /api/v1/system/maintenance": self._changed(views.modes),
            "GET /api/v1/system/maintenance/pop": self._merged(views.modes),
            "POST /api/v1/system/maintenance/pop": self._changed(views.modes),
            "GET /api/v1/status/buffers": self._merged(views.buffers),
            "GET /api/v1/resources/overview": self._merged(views.overview),
            "GET /api/v1/status": self._of_queue_or_all(views.status),
            "GET /api/v1/status/queues": self._paged("queues", lambda queue: queue["createdAt"], 100),
            "GET /api/v1/status/queues/{queue}": self._queue_in_path,
            "GET /api/v1/status/queues/{queue}/messages": self._queue_in_path,
            "GET /api/v1/status/analytics": self._of_queue_or_all(views.stored),
            "GET /api/v1/analytics/worker-metrics": self._merged(views.worker_metrics),
            "GET /api/v1/analytics/retention": self._merged(views.retention),
            "GET /api/v1/analytics/postgres-stats": self._merged(views.postgres),
            **dict.fromkeys(_OF_THE_WORKER, self._first),
        }

    def _of_topics(self) -> dict[str, Placer]:
        placers: dict[str, Placer] = {
            f"GET {_TOPICS}/dequeue/many": self._many.dequeue,
            f"POST {_TOPICS}/extend": self._batches.settle,
            f"POST {_TOPICS}/release": self._batches.settle,
            f"GET {_TOPICS}/peek": self._topic_in_query,
            f"GET {_TOPICS}/counts": self._merged(
                lambda answers: sorted(summed(answers), key=lambda one: (one["namespace"], one["topic"]))
            ),
            f"POST {_TOPICS}/configure": self._topic_configured,
            f"POST {_TOPICS}/purge": self._topic_in_body,
            f"DELETE {_TOPICS}": self._topic_in_query,
            f"GET {_TOPICS}/quotas": self._quotas,
            f"PUT {_TOPICS}/quotas": self._set_quota,
            f"GET {_TOPICS}/modes": self._merged(views.write_modes),
            f"PUT {_TOPICS}/modes": self._changed(views.write_mode),
        }
        for prefix in (_TOPICS, ""):
            placers |= {
                f"POST {prefix}/enqueue": self._batches.enqueue,
                f"GET {prefix}/dequeue": self._dequeue,
                f"POST {prefix}/ack": self._batches.settle,
                f"POST {prefix}/nack": self._batches.settle,
                f"GET {prefix or '/topics'}": self._merged(in_order),
                f"GET {prefix}/dlq": self._topic_in_query,
                f"POST {prefix}/dlq/delete": self._batches.settle,
                f"POST {prefix}/dlq/retry": self._batches.settle,
            }
        return placers

    async def _first(self, handlers: Handlers, request: Request) -> Response:
        return await call(handlers[0], request)

    async def _pop(self, handlers: Handlers, request: Request) -> Response:
        return await self._waiting.by_name(handlers, request, Name.queue(request.params["queue"]))

    async def _dequeue(self, handlers: Handlers, request: Request) -> Response:
        return await self._waiting.by_name(handlers, request, _topic(request))

    async def _extend(self, handlers: Handlers, request: Request) -> Response:
        lease = request.params["lease"]
        place = parse_lease(lease) if is_uuid(lease) else None
        return await self._calls.by_partition(handlers, request, place[0] if place is not None else 0)

    async def _queue_in_path(self, handlers: Handlers, request: Request) -> Response:
        return await self._calls.by_name(handlers, request, Name.queue(request.params["queue"]))

    async def _queue_in_body(self, handlers: Handlers, request: Request) -> Response:
        queue = optional_str(decode_object(request.body), "queue") or ""
        return await self._calls.by_name(handlers, request, Name.queue(queue))

    async def _queue_in_body_or_query(self, handlers: Handlers, request: Request) -> Response:
        if request.body:
            return await self._queue_in_body(handlers, request)
        return await self._calls.by_name(handlers, request, Name.queue(request.query.get("queue", "")))

    async def _partition_in_path(self, handlers: Handlers, request: Request) -> Response:
        return await self._calls.by_partition(handlers, request, partition_number(request.params["partition"]))

    async def _partition_in_body(self, handlers: Handlers, request: Request) -> Response:
        partition = optional_str(decode_object(request.body), "partitionId") or ""
        return await self._calls.by_partition(handlers, request, partition_number(partition))

    async def _queues(self, handlers: Handlers, request: Request) -> Response:
        if request.query.keys() & {"limit", "offset"}:
            return await self._paged("queues", lambda queue: queue["createdAt"], MOST_ON_A_PAGE)(handlers, request)
        return await self._merging.merged(handlers, request, _newest_first)

    async def _topic_in_query(self, handlers: Handlers, request: Request) -> Response:
        return await self._calls.by_name(handlers, request, _topic(request))

    async def _topic_in_body(self, handlers: Handlers, request: Request) -> Response:
        sent = decode_topic(request.body)
        return await self._calls.by_name(handlers, request, Name.topic(sent.namespace, sent.topic))

    async def _topic_configured(self, handlers: Handlers, request: Request) -> Response:
        sent = decode_configure(request.body)
        return await self._calls.by_name(handlers, request, Name.topic(sent.namespace, sent.topic))

    async def _set_quota(self, handlers: Handlers, request: Request) -> Response:
        return await self._calls.by_name(handlers, request, Name.namespace(decode_quota(request.body).namespace))

    async def _quotas(self, handlers: Handlers, request: Request) -> Response:
        """As the home of each namespace says."""
        answers = await self._calls.everyone(handlers, request)
        told: list[dict[str, Any]] = [_decode(answer) for answer in answers]
        names = sorted({name for one in told for name in one})
        homes = {name: await self._directory.find(Name.namespace(name)) for name in names}
        return json_response(200, {name: told[homes[name]][name] for name in names if name in told[homes[name]]})

    def _merged(self, merge: Callable[..., Json]) -> Placer:
        return lambda handlers, request: self._merging.merged(handlers, request, merge)

    def _changed(self, merge: Callable[..., Json]) -> Placer:
        return lambda handlers, request: self._merging.changed(handlers, request, merge)

    def _of_queue_or_all(self, merge: Callable[..., Json]) -> Placer:
        async def place(handlers: Handlers, request: Request) -> Response:
            queue = request.query.get("queue", "")
            if queue:
                return await self._calls.by_name(handlers, request, Name.queue(queue))
            return await self._merging.merged(handlers, request, merge)

        return place

    def _paged(self, items: str, key: Callable[[Json], Any], default: int, *, newest: bool = True) -> Placer:
        async def place(handlers: Handlers, request: Request) -> Response:
            queue = request.query.get("queue", "")
            if queue:
                return await self._calls.by_name(handlers, request, Name.queue(queue))
            return await self._merging.page(handlers, request, items, key, default, newest)

        return place


_OF_THE_WORKER: Final = (
    "GET /health",
    "GET /livez",
    "GET /readyz",
    "GET /openapi.json",
    "GET /docs",
    "GET /metrics",
    "GET /metrics/prometheus",
    "POST /internal/api/events",
    "GET /api/v1/system/shared-state",
    "GET /internal/api/shared-state/stats",
    "GET /internal/api/inter-instance/stats",
    "GET /api/v1/analytics/system-metrics",
    "GET /api/v1/analytics/queue-lag",
    "GET /api/v1/analytics/queue-ops",
    "GET /api/v1/analytics/queue-parked-replicas",
    "GET /api/v1/analytics/rollup",
    "GET /ws/v1/consume",
)
"""What a worker tells of itself, or of what it has counted for all shards."""


def _topic(request: Request) -> Name:
    namespace, topic = request.query.get("namespace", ""), request.query.get("topic", "")
    if not namespace or not topic:
        raise BadRequest(f"{'topic' if namespace else 'namespace'} is required (in the query)")
    return Name.topic(namespace, topic)


def _newest_first(answers: Any) -> Json:
    queues = [queue for answer in answers for queue in answer["queues"]]
    return {"queues": sorted(queues, key=lambda queue: str(queue["createdAt"]), reverse=True)}


def _of_group(answers: Any) -> Json:
    return summed(answers)


def _decode(response: Response) -> Any:
    return msgspec.json.decode(response.body)
