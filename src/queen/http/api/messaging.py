"""Push, pop, ack, renew, transaction: the hot routes."""

from __future__ import annotations

import asyncio

from queen.broker.broker import Broker
from queen.broker.pop.requests import PopOptions
from queen.errors import BadRequest, NotFound
from queen.http.api.params import MOST_BATCH, checked_group, starting_point
from queen.http.server.message import Request, Response, error_response, json_response
from queen.http.server.router import Access, Router
from queen.wire.ack import decode_ack, decode_ack_batch, decode_object
from queen.wire.push import check_name, decode_push
from queen.wire.times import iso_millis
from queen.wire.transaction import decode_transaction

_NOTHING = Response(204)


class MessagingRoutes:
    """The routes that move messages."""

    def __init__(self, broker: Broker, *, keep_bodies: bool = False) -> None:
        """`keep_bodies`: somebody looks at what was pushed when it has been answered."""
        self._broker = broker
        self._keep_bodies = keep_bodies

    def add_to(self, router: Router) -> None:
        write = Access.READ_WRITE
        router.add("POST", "/api/v1/push", self.push, write)
        router.add("GET", "/api/v1/pop", self.pop_filtered, write)
        router.add("GET", "/api/v1/pop/queue/{queue}", self.pop, write)
        router.add("GET", "/api/v1/pop/queue/{queue}/partition/{partition}", self.pop, write)
        router.add("POST", "/api/v1/ack", self.ack, write)
        router.add("POST", "/api/v1/ack/batch", self.ack_batch, write)
        router.add("POST", "/api/v1/transaction", self.transaction, write)
        router.add("POST", "/api/v1/lease/{lease}/extend", self.extend, write)

    def push(self, request: Request) -> Response | asyncio.Future[Response]:
        body = request.body
        push = decode_push(body)
        hold = push.hold
        if not push.items:
            return Response(201, b"[]")
        if not self._keep_bodies:
            # The pusher has it as long as it needs it: until it is packed.
            request.body = b""
        return self._broker.pusher.push(push.items, len(body), _created, hold=hold)

    def pop(self, request: Request) -> asyncio.Future[Response]:
        queue, partition = request.params["queue"], request.params.get("partition")
        check_name(queue, "Queue", "/pop/queue/<queue>")
        if partition is not None:
            check_name(partition, "Partition", "/partition/<partition>")
        return self.pop_from(request, (queue,), partition)

    async def pop_filtered(self, request: Request) -> Response:
        """Pop from every queue of a namespace, of a task, or of both; those of higher priority first."""
        namespace, task = request.query.get("namespace", ""), request.query.get("task", "")
        if not namespace and not task:
            raise BadRequest("namespace or task is required (or pop one queue at /api/v1/pop/queue/<queue>)")
        popping = asyncio.ensure_future(
            self._broker.namespace_pops.pop(namespace, task, self._group(request), self._options(request))
        )
        request.on_disconnect(popping.cancel)
        return _popped(await popping)

    def pop_from(self, request: Request, queues: tuple[str, ...], partition: str | None) -> asyncio.Future[Response]:
        """Pop from these queues, as the query of the request says."""
        answer = self._broker.popper.pop(queues, partition, self._group(request), self._options(request), _popped)
        request.on_disconnect(answer.cancel)
        return answer

    def _group(self, request: Request) -> str:
        return checked_group(request.query.get("consumerGroup"))

    def _options(self, request: Request) -> PopOptions:
        settings = self._broker.settings
        query = request.query
        wait = request.query_bool("wait", False)
        mode, since = starting_point(query.get("subscriptionMode", ""), query.get("subscriptionFrom", ""))
        return PopOptions(
            batch=min(MOST_BATCH, max(1, request.query_int("batch", settings.default_batch_size))),
            partitions=max(1, request.query_int("partitions", 1)),
            auto_ack=request.query_bool("autoAck", False),
            wait=wait,
            timeout=max(0, request.query_int("timeout", settings.default_timeout)) / 1000,
            subscription_mode=mode,
            subscription_from=since,
        )

    def ack(self, request: Request) -> asyncio.Future[Response]:
        item, group = decode_ack(request.body)
        return self._broker.acker.ack([item], checked_group(group), _ok, batch=False)

    def ack_batch(self, request: Request) -> Response | asyncio.Future[Response]:
        items, group = decode_ack_batch(request.body)
        if not items:
            return Response(200, b"[]")
        return self._broker.acker.ack(items, checked_group(group), _ok, batch=True)

    async def transaction(self, request: Request) -> Response:
        operations = decode_transaction(request.body)
        return json_response(200, await self._broker.transactions.run(operations))

    async def extend(self, request: Request) -> Response:
        seconds: object = 60
        if request.body:
            seconds = decode_object(request.body).get("seconds", 60)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= 86_400 * 7:
            raise BadRequest("seconds must be a number above 0 and at most 604800")
        lease = request.params["lease"]
        try:
            end = iso_millis(await self._broker.renewer.renew(lease, float(seconds)))
        except NotFound as error:
            return error_response(404, str(error))
        return json_response(
            200,
            {
                "index": 0,
                "leaseId": lease,
                "success": True,
                "error": None,
                "expiresAt": end,
                "newExpiresAt": end,
                "lease_expires_at": end,
            },
        )


def _created(body: bytes) -> Response:
    return Response(201, body)


def _ok(body: bytes) -> Response:
    return Response(200, body)


def _popped(body: bytes | None) -> Response:
    return _NOTHING if body is None else Response(200, body)
