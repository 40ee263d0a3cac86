"""The session of one consumer on one WebSocket: its subscriptions, its leases, and its requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import asyncpg

from queen.broker.ack.leases import HeldLease
from queen.broker.broker import Broker
from queen.broker.pop.requests import PopRequest
from queen.errors import BadRequest, Conflict, Forbidden, NotFound, QueenError
from queen.http.auth.resources import ConsumerLimits
from queen.http.consume import answers
from queen.http.consume.held import HeldLeases, lease_of
from queen.http.consume.options import check_conflation, checked_group, starting_point
from queen.http.consume.requests import (
    Acknowledge,
    AddCredit,
    InvalidMessage,
    Ping,
    Refuse,
    Renew,
    Request,
    RequestId,
    Subscribe,
    Unsubscribe,
    decode_request,
)
from queen.http.consume.subscription import Subscription
from queen.http.server.errors import status_of
from queen.http.server.websocket import WebSocket
from queen.log.catalog import QUEUE_MODE
from queen.wire.ack import AckItem
from queen.wire.push import check_name

if TYPE_CHECKING:
    from queen.broker.sharding.sharded_broker import ShardedBroker

log = logging.getLogger(__name__)

T = TypeVar("T")
Spawn = Callable[[Coroutine[Any, Any, None]], None]

GOING_AWAY: Final = 1001
POLICY_VIOLATION: Final = 1008
_GOING_AWAY_TEXT: Final = "the server is shutting down"
_DEFAULT_LEASE_SECONDS: Final = 60
# Acks and renewals under way on one socket before it is not read any further.
_MOST_WORKING: Final = 64


class Session:
    """Serves the requests of one client. Every rule is the broker's: this only passes on."""

    def __init__(
        self,
        broker: Broker | ShardedBroker,
        socket: WebSocket,
        spawn: Spawn,
        limits: ConsumerLimits | None = None,
    ) -> None:
        """`spawn` runs what has to be finished although the client is gone."""
        self._limits = limits
        self._broker = broker
        self._socket = socket
        self._spawn = spawn
        self._subscriptions: dict[str, Subscription] = {}
        self._held = HeldLeases()
        self._working: set[asyncio.Future[Any]] = set()
        self._draining = False

    # What the WebSocket calls.

    def received(self, text: bytes) -> None:
        try:
            request = decode_request(text)
        except InvalidMessage as error:
            self._socket.send(answers.error(error.id, error.kind, 400, str(error)))
            return
        try:
            self._serve(request)
        except Exception as error:
            self._refuse(request, error)

    def paused(self) -> None:
        for subscription in self._subscriptions.values():
            subscription.hold()

    def resumed(self) -> None:
        for subscription in self._subscriptions.values():
            subscription.ask()

    def closed(self) -> None:
        for subscription in self._subscriptions.values():
            subscription.abandon()
        self._spawn(self._let_go())

    # What the routes call.

    def keep_time(self, now: float) -> None:
        """Notify the client of expired leases, and close when its token has expired."""
        if self._limits is not None and self._limits.expired and self._socket.is_open:
            self._socket.close(POLICY_VIOLATION, "the token has expired: connect again with another")
            return
        for held in self._held.take_expired(now):
            self._socket.send(answers.lost(held.subscription, held.lease.lease_id))
        self._close_if_done()

    def drain(self, seconds: float) -> None:
        """Deliver nothing more, and close when all that was delivered is settled (`Consumers` waits `seconds`)."""
        self._draining = True
        self._socket.send(answers.closing(_GOING_AWAY_TEXT, seconds))
        for subscription in list(self._subscriptions.values()):
            subscription.stop(self._close_if_done)
        self._close_if_done()

    def close(self) -> None:
        """Close now, whatever is under way."""
        self._socket.close(GOING_AWAY, _GOING_AWAY_TEXT)

    # What subscriptions call.

    @property
    def is_paused(self) -> bool:
        return self._socket.is_paused or not self._socket.is_open

    def begun(self, subscription: Subscription) -> None:
        asked = subscription.request.conflation is not None
        self._socket.send(
            answers.subscribed(
                subscription.id,
                queue=subscription.request.queues[0],
                partition=subscription.request.partition,
                consumerGroup=subscription.request.group,
                batch=subscription.request.batch,
                partitions=subscription.request.partitions,
                credit=subscription.credit,
                autoAck=subscription.request.auto_ack,
                **({"conflation": subscription.conflates} if asked else {}),
            )
        )

    def refused(self, subscription: Subscription, error: BaseException) -> None:
        self._subscriptions.pop(subscription.id, None)
        self.failed(subscription, error)

    def failed(self, subscription: Subscription, error: BaseException) -> None:
        self._send_error(subscription.id, "subscribe", error)

    def deliver(self, subscription: Subscription, body: bytes) -> None:
        lease = lease_of(body)
        if lease is None:
            self._socket.send(answers.batch(answers.batch_head(subscription.id), body, None))
            return
        if not self._socket.is_open or self._draining:
            self._spawn(self._release([lease]))
            return
        queue = self._broker.catalog.cached_queue(subscription.request.queues[0])
        seconds = queue.lease_seconds if queue is not None else _DEFAULT_LEASE_SECONDS
        until = asyncio.get_running_loop().time() + seconds
        self._held.add(lease, subscription.id, subscription.request.group, until)
        self._socket.send(answers.batch(answers.batch_head(subscription.id), body, seconds))

    # Requests.

    def _serve(self, request: Request) -> None:
        if isinstance(request, Acknowledge | Refuse):
            self._ack(request)
        elif isinstance(request, AddCredit):
            self._subscription(request.id).grant(request.credit)
        elif isinstance(request, Renew):
            self._renew(request)
        elif isinstance(request, Subscribe):
            self._subscribe(request)
        elif isinstance(request, Unsubscribe):
            self._unsubscribe(request)
        elif isinstance(request, Ping):
            self._socket.send(answers.pong(request.id))

    def _ack(self, request: Acknowledge | Refuse) -> None:
        items = request.items()
        subscription = self._subscription(request.subscription) if request.subscription is not None else None
        group = self._group_of(request, subscription, items)
        self._check_held([(item.lease_id, item.partition_id) for item in items], group)
        if request.credit is not None:
            if subscription is None:
                raise BadRequest("credit needs the id of the subscription it is for (at subscription)")
            subscription.grant(request.credit)
        if not items:
            self._socket.send(answers.acked(request.id, b"[]"))
            return
        answer = self._broker.acker.ack(items, group, bytes, batch=request.is_batch)
        self._follow(request, answer, partial(self._acked, request.id, items, group))

    def _check_held(self, leases: Sequence[tuple[str | None, str | None]], group: str | None = None) -> None:
        """A client with limits may settle only what was delivered on this connection: leases, and their partitions.

        Of other partitions the answer would say what they and their queues are called.
        """
        limits = self._limits
        if limits is None or not limits.is_limited:
            return
        if group is not None:
            limits.check_group(group)
        if not all(self._held.covers(lease, partition) for lease, partition in leases):
            raise Forbidden("the token is limited: only leases that were delivered on this connection can be settled")

    def _group_of(
        self, request: Acknowledge | Refuse, subscription: Subscription | None, items: Sequence[AckItem]
    ) -> str:
        """Who acks: as the request says, else the group the messages were delivered to."""
        if request.consumer_group:
            return checked_group(request.consumer_group)
        if subscription is not None:
            return subscription.request.group
        held = self._held.get(items[0].lease_id) if items else None
        return held.group if held is not None else QUEUE_MODE

    def _acked(self, id: RequestId, items: Sequence[AckItem], group: str, results: bytes) -> None:
        self._held.settle(items, group, results)
        self._socket.send(answers.acked(id, results))

    def _renew(self, request: Renew) -> None:
        self._check_held([(request.lease_id, None)])
        since = asyncio.get_running_loop().time()
        answer = self._broker.renewer.renew(request.lease_id, request.seconds)

        def renewed(lease: Any) -> None:
            held = self._held.get(request.lease_id)
            if held is not None:
                held.until = max(held.until, since + request.seconds)
            self._socket.send(answers.renewed(request.id, request.lease_id, lease.until))

        self._follow(request, answer, renewed)

    def _subscribe(self, request: Subscribe) -> None:
        if self._limits is not None and self._limits.is_limited:
            self._spawn(self._subscribe_within(request, self._limits))
        else:
            self._begin_subscription(request)

    async def _subscribe_within(self, request: Subscribe, limits: ConsumerLimits) -> None:
        try:
            await limits.check_subscription(request.queue, checked_group(request.consumer_group))
            if self._socket.is_open:
                self._begin_subscription(request)
        except Exception as error:
            self._refuse(request, error)

    def _begin_subscription(self, request: Subscribe) -> None:
        settings = self._broker.settings
        check_name(request.queue, "Queue", "queue")
        if request.partition is not None:
            check_name(request.partition, "Partition", "partition")
        if self._draining:
            raise Conflict(_GOING_AWAY_TEXT)
        if request.id in self._subscriptions:
            raise Conflict(f"there is a subscription {request.id!r} already; unsubscribe it or choose another id")
        if len(self._subscriptions) >= settings.websocket_max_subscriptions:
            most = settings.websocket_max_subscriptions
            raise BadRequest(f"one connection may have at most {most} subscriptions (WEBSOCKET_MAX_SUBSCRIPTIONS)")
        check_conflation(request.conflation, request.consumer_group, request.auto_ack)
        mode, since = starting_point(request.subscription_mode, request.subscription_from)
        if request.subscription_from not in ("", "now") and since is None:
            raise BadRequest("subscriptionFrom must be `now` or a time such as 2026-01-31T10:00:00Z")
        subscription = self._subscriptions[request.id] = Subscription(
            request.id,
            PopRequest(
                (request.queue,),
                request.partition,
                checked_group(request.consumer_group),
                batch=request.batch or settings.default_batch_size,
                partitions=request.partitions,
                auto_ack=request.auto_ack,
                subscription_mode=mode,
                subscription_from=since,
                conflation=request.conflation,
            ),
            request.credit,
            self._broker.popper,
            self,
        )
        subscription.begin()

    def _unsubscribe(self, request: Unsubscribe) -> None:
        subscription = self._subscription(request.id)
        subscription.stop(partial(self._unsubscribed, subscription, request.release))

    def _unsubscribed(self, subscription: Subscription, release: bool) -> None:
        self._subscriptions.pop(subscription.id, None)
        self._spawn(self._let_go_of(subscription.id, release))

    async def _let_go_of(self, id: str, release: bool) -> None:
        if release:
            await self._release(self._held.take_of(id))
        self._socket.send(answers.unsubscribed(id))

    def _subscription(self, id: str) -> Subscription:
        try:
            return self._subscriptions[id]
        except KeyError:
            raise NotFound(f"there is no subscription {id!r} on this connection") from None

    # What is under way.

    def _follow(self, request: Request, answer: asyncio.Future[T], done: Callable[[T], None]) -> None:
        self._working.add(answer)
        if len(self._working) == _MOST_WORKING:
            self._socket.set_busy(True)
        answer.add_done_callback(partial(self._finish, request, done))

    def _finish(self, request: Request, done: Callable[[T], None], answer: asyncio.Future[T]) -> None:
        self._working.discard(answer)
        if len(self._working) == _MOST_WORKING - 1:
            self._socket.set_busy(False)
        error = answer.exception()
        if error is not None:
            self._refuse(request, error)
        else:
            done(answer.result())
        self._close_if_done()

    def _close_if_done(self) -> None:
        if not self._draining or self._working or self._held:
            return
        if all(subscription.is_idle for subscription in self._subscriptions.values()):
            self.close()

    async def _let_go(self) -> None:
        """Have the leases of a client that is gone released, as soon as its last acks are through."""
        if self._working:
            await asyncio.wait(self._working)
        await self._release(self._held.take_all())

    async def _release(self, leases: Sequence[HeldLease]) -> None:
        if not leases:
            return
        try:
            await self._broker.releaser.release(leases)
        except (QueenError, asyncpg.PostgresError) as error:
            log.warning("%d leases of a disconnected consumer are kept until they expire: %s", len(leases), error)

    def _refuse(self, request: Request, error: BaseException) -> None:
        self._send_error(request.id, str(request.__struct_config__.tag), error)

    def _send_error(self, id: RequestId, kind: str, error: BaseException) -> None:
        if isinstance(error, QueenError):
            status, text = status_of(error)[0], str(error)
            if self._limits is not None and isinstance(error, Forbidden):
                self._limits.on_refused(text)
        else:
            log.error("%s over a WebSocket failed", kind, exc_info=error)
            status, text = 500, "Internal server error"
        self._socket.send(answers.error(id, kind, status, text))
