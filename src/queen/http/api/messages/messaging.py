"""Push, pop, ack, renew, transaction: the hot routes."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

import msgspec

from queen.broker.pop.requests import PopRequest, state_conflation
from queen.errors import BadRequest, Forbidden
from queen.http.auth import names
from queen.http.auth.principal import is_subject
from queen.http.consume.options import check_conflation, checked_group, starting_point
from queen.http.routing.call import Call
from queen.http.routing.context import Api, Shard
from queen.http.routing.placement import Custom, Invoke, by_lease
from queen.http.routing.route import FOUND, SEALED, RouteTable
from queen.http.server.message import Access, Request, Response
from queen.settings import Settings
from queen.wire.ack import AckBatch, SingleAck, decode_ack, decode_ack_batch
from queen.wire.api.messages.messaging import (
    AckDone,
    AckResult,
    Extended,
    Extension,
    NamespacePopQuery,
    Popped,
    PopQuery,
    PushCounts,
    PushDone,
    PushQuery,
    PushResult,
    TransactionResult,
)
from queen.wire.binary.pop import MAGIC as FRAMES
from queen.wire.binary.pop import MEDIA_TYPE as FRAMES_TYPE
from queen.wire.binary.push import MAGIC, decode_binary_push
from queen.wire.ids import partition_number
from queen.wire.push import PushBody, PushRequest, check_name, decode_push
from queen.wire.shards import Name
from queen.wire.times import iso_millis
from queen.wire.transaction import (
    AckItemOperation,
    AckOperation,
    CountedOperations,
    EnqueueOperation,
    KvRider,
    Operation,
    PushOperation,
    TimerRider,
    TransactionBody,
    decode_transaction,
)

routes = RouteTable("Messaging")

_statuses: Final = msgspec.json.Decoder(list[PushResult])
_NOTHING: Final = Response(204)
_AUTOPILOT_BATCH: Final = 200
_ID: Final = "019ae0f0-6f2c-7000-8000-000000000001"
_PARTITION: Final = "00000000-0000-8000-8000-000000000001"
_LEASE: Final = "019ae0f0-7000-7000-8000-000000000001"
_POPPED: Final = {
    "success": True,
    "queue": "orders",
    "partition": "Default",
    "partitionId": _PARTITION,
    "leaseId": _LEASE,
    "consumerGroup": "workers",
    "messages": [
        {
            "id": _ID,
            "transactionId": "order-1",
            "traceId": None,
            "data": {"total": 12.5},
            "producerSub": None,
            "createdAt": "2026-04-26T10:59:28.267966Z",
            "partitionId": _PARTITION,
            "partition": "Default",
            "leaseId": _LEASE,
            "consumerGroup": "workers",
        }
    ],
    "partitionsClaimed": 1,
}
_ACKED: Final = [
    {
        "index": 0,
        "transactionId": "order-1",
        "success": True,
        "error": None,
        "queueName": "orders",
        "partitionName": "Default",
        "leaseReleased": True,
        "dlq": False,
    }
]
_POP_DESCRIPTION: Final = (
    "204 when there are no messages. Messages are leased to the caller until they are acknowledged or the lease "
    "expires; meanwhile no other consumer of the group gets messages of these partitions."
)
_ACK_DESCRIPTION: Final = (
    "Acknowledging a message as completed consumes everything before it in its partition. `failed` has it delivered "
    "again until the queue's `retryLimit` is used up, then it becomes a dead letter. An item that cannot be applied "
    "is answered `success: false` and does not affect the others."
)


@routes.direct(
    "POST",
    "/api/v1/push",
    access=Access.READ_WRITE,
    names=names.pushed,
    of_groups=False,
    summary="Store messages",
    description="Queues and partitions are created when they are first named. Within the queue's dedup window, a "
    "`transactionId` that its partition has already is answered as `duplicate` and stored once. A 201 means that "
    "every item answered `queued` is durable in PostgreSQL, and every item answered `buffered` on the disk of the "
    "server, from where it is replayed to PostgreSQL. `data` is accepted in place of `payload`.",
    query=PushQuery,
    body=PushBody,
    decode=decode_push,
    body_example={
        "items": [{"queue": "orders", "partition": "Default", "transactionId": "order-1", "payload": {"total": 12.5}}]
    },
    returns={201: list[PushResult] | PushCounts},
    example=[
        {
            "index": 0,
            "transaction_id": "order-1",
            "status": "queued",
            "message_id": _ID,
            "partition_id": _PARTITION,
            "trace_id": None,
            "queueName": "orders",
        }
    ],
    errors=SEALED,
)
def push(api: Api, request: Request) -> Response | asyncio.Future[Response]:
    body = request.body
    if body.startswith(MAGIC):
        return _push_binary(api, request)
    push = decode_push(body)
    hold = push.hold
    if not push.items:
        return Response(201, b"[]")
    if not api.keep_bodies:
        # The pusher has it as long as it needs it: until it is packed.
        request.body = b""
    query: PushQuery = request.args
    subject = request.subject if not query.producer_sub else _producer(request, query.producer_sub)
    return api.broker.pusher.push(PushRequest(push.items, len(body), subject, hold), _created)


def _push_binary(api: Api, request: Request) -> Response | asyncio.Future[Response]:
    push = decode_binary_push(request.body, api.settings.max_push_items)
    render = _created_counts if push.counts else _created
    if not push.items:
        return render(b"[]")
    query: PushQuery = request.args
    subject = request.subject if not query.producer_sub else _producer(request, query.producer_sub)
    if not api.keep_bodies:
        request.body = b""
    return api.broker.pusher.push(PushRequest(push.items, push.nbytes, subject, None), render)


def _producer(request: Request, producer: str) -> str | None:
    """The producer to record, where an administrator names another than the sender."""
    principal = request.principal
    if principal is None:
        # Without authentication there is no producer to record.
        return None
    if principal.access < Access.ADMIN:
        raise Forbidden("producerSub in the query needs a token with the role admin; all others push for themselves")
    if not is_subject(producer):
        raise BadRequest("producerSub must be up to 1024 printable characters")
    return producer


@routes.direct(
    "GET",
    "/api/v1/pop",
    access=Access.READ_WRITE,
    names=names.popped,
    id="popFiltered",
    summary="Pop from every queue of a namespace, of a task, or of both",
    description="Queues of higher priority come first. " + _POP_DESCRIPTION,
    query=NamespacePopQuery,
    returns={200: Popped, 204: None},
    example=_POPPED,
    errors=SEALED,
)
async def pop_namespace(api: Api, request: Request) -> Response:
    query: NamespacePopQuery = request.args
    if not query.namespace and not query.task:
        raise BadRequest("namespace or task is required (or pop one queue at /api/v1/pop/queue/<queue>)")
    asked = _pop_request(api.settings, query)
    popping = asyncio.ensure_future(api.broker.namespace_pops.pop(query.namespace, query.task, asked))
    request.on_disconnect(popping.cancel)
    return _framed(state_conflation(await popping, asked, None))


@routes.direct(
    "GET",
    "/api/v1/pop/queue/{queue}",
    access=Access.READ_WRITE,
    names=names.popped,
    id="pop",
    summary="Pop from any partition of a queue",
    description="The partition that has been ready longest comes first. " + _POP_DESCRIPTION,
    query=PopQuery,
    returns={200: Popped, 204: None},
    example=_POPPED,
    errors=SEALED,
)
@routes.direct(
    "GET",
    "/api/v1/pop/queue/{queue}/partition/{partition}",
    access=Access.READ_WRITE,
    names=names.popped,
    id="popPartition",
    summary="Pop from one partition",
    description=_POP_DESCRIPTION,
    query=PopQuery,
    returns={200: Popped, 204: None},
    example=_POPPED,
    errors=SEALED,
)
def pop(api: Api, request: Request) -> asyncio.Future[Response]:
    queue, partition = request.params["queue"], request.params.get("partition")
    check_name(queue, "Queue", "/pop/queue/<queue>")
    if partition is not None:
        check_name(partition, "Partition", "/partition/<partition>")
    query: PopQuery = request.args
    asked = _pop_request(api.settings, query, (queue,), partition)
    answer = api.broker.popper.pop(asked, _framed if query.frames else _popped)
    request.on_disconnect(answer.cancel)
    return answer


@routes.direct(
    "POST",
    "/api/v1/ack",
    access=Access.READ_WRITE,
    names=names.acked,
    summary="Acknowledge one message",
    description=_ACK_DESCRIPTION,
    body=SingleAck,
    decode=lambda body: decode_ack(body)[0],
    body_example={
        "transactionId": "order-1",
        "partitionId": _PARTITION,
        "leaseId": _LEASE,
        "status": "completed",
        "consumerGroup": "workers",
    },
    returns={200: list[AckResult]},
    example=_ACKED,
    errors=SEALED,
)
def ack(api: Api, request: Request) -> asyncio.Future[Response]:
    item, group = decode_ack(request.body)
    return api.broker.acker.ack([item], checked_group(group), _ok, batch=False)


@routes.direct(
    "POST",
    "/api/v1/ack/batch",
    access=Access.READ_WRITE,
    names=names.acked_batch,
    summary="Acknowledge messages",
    description=_ACK_DESCRIPTION,
    body=AckBatch,
    decode=decode_ack_batch,
    body_example={
        "acknowledgments": [{"transactionId": "order-1", "partitionId": _PARTITION, "leaseId": _LEASE}],
        "consumerGroup": "workers",
    },
    returns={200: list[AckResult]},
    example=_ACKED,
    errors=SEALED,
)
def ack_batch(api: Api, request: Request) -> Response | asyncio.Future[Response]:
    items, group = decode_ack_batch(request.body)
    if not items:
        return Response(200, b"[]")
    return api.broker.acker.ack(items, checked_group(group), _ok, batch=True)


async def _place_transaction(shards: Any, invoke: Invoke, call: Call[None, list[Operation]]) -> Any:
    """Everything that a transaction names has to live on one shard."""
    operations = call.body
    names = [name for one in operations if (name := _name(one)) is not None]
    partitions = [partition_number(one.partition_id) for one in operations if isinstance(one, AckOperation)]
    items = [one.item for one in operations if isinstance(one, EnqueueOperation)]

    async def find() -> int:
        return int(await shards.one_shard(names, partitions, "the transaction"))

    shard = await find()
    await shards.rules.admit(items, [shard] * len(items))
    if (await shards.rules.claim(items, [shard] * len(items))).owners:
        raise BadRequest(
            "an idempotency key of the transaction belongs to an item on another shard: nothing was done;"
            " use another key, or enqueue outside of the transaction"
        )
    return await shards.placed(find, lambda shard: invoke(shard, call))


@routes.on_shard(
    "POST",
    "/api/v1/transaction",
    access=Access.READ_WRITE,
    names=names.transaction,
    of_groups=False,
    placement=Custom(_place_transaction),
    summary="Store and acknowledge messages, all or nothing",
    description="A transaction that cannot be done is answered 200 with `success: false`. Unlike in a push, a "
    "`transactionId` that is there already is such a failure, and so is an operation at `kv` that is `required` and "
    "does not apply.",
    body=TransactionBody,
    decode=decode_transaction,
    body_example={
        "operations": [
            {"type": "push", "items": [{"queue": "invoices", "payload": {"order": 1}}]},
            {"type": "ack", "transactionId": "order-1", "partitionId": _PARTITION, "leaseId": _LEASE},
        ]
    },
    returns={200: TransactionResult},
    errors=(*SEALED, 429),
)
async def transaction(shard: Shard, call: Call[None, list[Operation]]) -> TransactionResult:
    result = await shard.broker.transactions.run(call.body, call.request.subject)
    if isinstance(call.body, CountedOperations) and result.success:
        done = result.results
        result.pushed = sum(isinstance(one, PushDone) for one in done)
        result.duplicate, result.acked = 0, sum(isinstance(one, AckDone) for one in done)
        result.results = [one for one in done if not isinstance(one, PushDone | AckDone)]
    return result


@routes.on_shard(
    "POST",
    "/api/v1/lease/{lease}/extend",
    access=Access.READ_WRITE,
    names=names.lease,
    of_groups=False,
    placement=by_lease(),
    id="extendLease",
    summary="Renew a lease",
    description="Extends the lease on all partitions it holds; 404 when it has expired.",
    body=Extension,
    body_required=False,
    body_example={"seconds": 60},
    returns={200: Extended},
    errors=FOUND,
)
async def extend(shard: Shard, call: Call[None, Extension | None]) -> Extended:
    seconds = call.body.seconds if call.body is not None else 60
    lease = call.params["lease"]
    renewed = await shard.broker.renewer.renew(lease, float(seconds))
    end = iso_millis(renewed.until)
    return Extended(0, lease, True, None, end, end, end, renewed.partitions)


def _pop_request(
    settings: Settings, query: PopQuery, queues: tuple[str, ...] = (), partition: str | None = None
) -> PopRequest:
    mode, since = starting_point(query.subscription_mode, query.subscription_from)
    check_conflation(query.conflation, query.consumer_group, query.auto_ack)
    timeout = settings.default_timeout if query.timeout is None else query.timeout
    return PopRequest(
        queues,
        partition,
        checked_group(query.consumer_group),
        batch=query.batch or (_AUTOPILOT_BATCH if query.autopilot else settings.default_batch_size),
        partitions=query.partitions,
        auto_ack=query.auto_ack,
        wait=query.wait,
        timeout=min(timeout, settings.max_wait_ms) / 1000,
        subscription_mode=mode,
        subscription_from=since,
        lease_seconds=query.lease_seconds,
        conflation=query.conflation,
        frames=query.frames,
    )


def _name(operation: Operation) -> Name | None:
    if isinstance(operation, PushOperation):
        return Name.queue(operation.item.queue)
    if isinstance(operation, EnqueueOperation):
        return Name.topic(operation.item.namespace, operation.item.topic)
    if isinstance(operation, AckItemOperation):
        return Name.topic(operation.ref.namespace, operation.ref.topic)
    if isinstance(operation, KvRider):
        return Name.queue(operation.operation.ns)
    if isinstance(operation, TimerRider):
        return Name.queue(operation.operation.queue)
    return None


def _created(body: bytes) -> Response:
    return Response(201, body)


def _created_counts(body: bytes) -> Response:
    """How many items were stored, in place of a result for each."""
    statuses = Counter(one.status for one in _statuses.decode(body))
    counts = PushCounts(
        statuses.total(), statuses["queued"] + statuses["buffered"], statuses["duplicate"], statuses["failed"]
    )
    return Response(201, msgspec.json.encode(counts))


def _ok(body: bytes) -> Response:
    return Response(200, body)


def _popped(body: bytes | None) -> Response:
    return _NOTHING if body is None else Response(200, body)


def _framed(body: bytes | None) -> Response:
    return Response(200, body, FRAMES_TYPE) if body is not None and body.startswith(FRAMES) else _popped(body)
