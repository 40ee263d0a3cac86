"""Consumer groups: where they are, seeking, subscriptions, deleting."""

from __future__ import annotations

from datetime import datetime

from queen.broker.broker import Broker
from queen.broker.inspect.groups import Groups
from queen.errors import BadRequest
from queen.http.api.params import MOST_ON_A_PAGE, path_name, read_page, time_of
from queen.http.api.view_cache import ViewCache
from queen.http.server.message import Request, Response, json_response
from queen.http.server.router import Access, Router
from queen.wire.ack import decode_object
from queen.wire.times import iso_millis

_GROUP = "/api/v1/consumer-groups/{group}"
_QUEUE = f"{_GROUP}/queues/{{queue}}"
_MIN_LAG_SECONDS = 3600


class GroupRoutes:
    """The routes of consumer groups."""

    def __init__(self, broker: Broker, shared: ViewCache) -> None:
        self._shared = shared
        self._groups = Groups(broker.database, broker.catalog, broker.publish)

    def add_to(self, router: Router) -> None:
        read, write, admin, shared = Access.READ_ONLY, Access.READ_WRITE, Access.ADMIN, self._shared.of
        router.add("GET", "/api/v1/consumer-groups", shared(self.groups), read)
        router.add("GET", "/api/v1/consumer-groups/lagging", shared(self.lagging), read)
        router.add("GET", _GROUP, self.group, read)
        router.add("DELETE", _GROUP, self.delete, admin)
        router.add("DELETE", _QUEUE, self.delete_for_queue, admin)
        router.add("POST", f"{_GROUP}/subscription", self.subscription, write)
        router.add("POST", f"{_QUEUE}/seek", self.seek, write)
        router.add("POST", f"{_QUEUE}/partitions/{{partition}}/seek", self.seek_partition, write)

    async def groups(self, request: Request) -> Response:
        return json_response(200, await self._groups.summaries())

    async def lagging(self, request: Request) -> Response:
        """Partitions on which a group is more than `minLagSeconds` behind; `limit` and `offset` page through them."""
        seconds = _seconds(request.query.get("minLagSeconds", ""))
        limit, offset = read_page(request, MOST_ON_A_PAGE)
        return json_response(200, await self._groups.lagging(seconds, limit, offset))

    async def group(self, request: Request) -> Response:
        return json_response(200, await self._groups.detail(path_name(request, "group")))

    async def delete(self, request: Request) -> Response:
        """Forget where a group is on all queues, and its subscriptions unless `deleteMetadata=false`."""
        group, with_subscriptions = path_name(request, "group"), request.query_bool("deleteMetadata", True)
        count = await self._groups.delete(group, None, with_subscriptions=with_subscriptions)
        return json_response(
            200,
            {
                "success": True,
                "consumerGroup": group,
                "deletedPartitions": count,
                "metadataDeleted": with_subscriptions,
            },
        )

    async def delete_for_queue(self, request: Request) -> Response:
        """The same for one queue."""
        group, queue = path_name(request, "group"), path_name(request, "queue")
        with_subscriptions = request.query_bool("deleteMetadata", True)
        count = await self._groups.delete(group, queue, with_subscriptions=with_subscriptions)
        return json_response(
            200,
            {
                "success": True,
                "consumerGroup": group,
                "queueName": queue,
                "deletedPartitions": count,
                "metadataDeleted": with_subscriptions,
            },
        )

    async def subscription(self, request: Request) -> Response:
        """Have a group start at another time on partitions it has not consumed from yet."""
        group = path_name(request, "group")
        body = decode_object(request.body)
        if body.get("subscriptionTimestamp") is None:
            raise BadRequest("Missing subscriptionTimestamp in request body")
        since = _time(body["subscriptionTimestamp"], "subscriptionTimestamp")
        count = await self._groups.move_subscriptions(group, since)
        return json_response(
            200,
            {
                "success": True,
                "consumerGroup": group,
                "newTimestamp": body["subscriptionTimestamp"],
                "rowsUpdated": count,
            },
        )

    async def seek(self, request: Request) -> Response:
        """Move a group on a queue: `{"toEnd": true}` or `{"timestamp": …}`."""
        group, queue = path_name(request, "group"), path_name(request, "queue")
        body = decode_object(request.body)
        to_end, timestamp = body.get("toEnd") is True, body.get("timestamp")
        if not to_end and timestamp is None:
            raise BadRequest("Must specify either 'toEnd': true or 'timestamp'")
        count = await self._groups.seek(group, queue, None if to_end else _time(timestamp, "timestamp"))
        return json_response(
            200,
            {
                "success": True,
                "consumerGroup": group,
                "queueName": queue,
                "seekToEnd": to_end,
                "targetTimestamp": None if to_end else timestamp,
                "partitionsUpdated": count,
            },
        )

    async def seek_partition(self, request: Request) -> Response:
        """Have a group skip all there is on one partition."""
        group, queue, partition = (path_name(request, key) for key in ("group", "queue", "partition"))
        result = await self._groups.seek_partition(group, queue, partition)
        return json_response(
            200,
            {
                "success": True,
                "consumerGroup": group,
                "queueName": queue,
                "partitionName": partition,
                "updated": result.updated,
                "cursorMovedTo": iso_millis(result.moved_to),
            },
        )


def _seconds(text: str) -> int:
    if not text:
        return _MIN_LAG_SECONDS
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise BadRequest(f"minLagSeconds must be a whole number of seconds, not {text!r}")
    return int(text)


def _time(value: object, name: str) -> datetime:
    moment = time_of(value, name) if isinstance(value, str) else None
    if moment is None:
        raise BadRequest(f"{name} must be an ISO-8601 time such as 2026-04-26T10:59:28Z, not {value!r}")
    return moment
