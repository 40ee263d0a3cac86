"""Keys and values, locks, timers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from queen.broker.sharding.shard_router import ShardRouter
from queen.http.auth import names
from queen.http.routing.call import Call
from queen.http.routing.context import Shard
from queen.http.routing.placement import Custom, Invoke, Paged, Placement, by_queue
from queen.http.routing.route import DATABASE, FOUND, SEALED, RouteTable
from queen.http.server.message import Access
from queen.wire.fields import PrefixPage
from queen.wire.shards import Name
from queen.wire.state.kv import (
    KvAnswer,
    KvBody,
    KvList,
    KvNamespaces,
    KvNamespacesQuery,
    KvOperation,
    KvRow,
    check_key,
    decode_kv,
    namespaces_of,
)
from queen.wire.state.locks import NAMESPACE, LockAnswer, LockBody, LockList, LockOperation, decode_locks
from queen.wire.state.timers import (
    Cancel,
    CancelQuery,
    PendingTimers,
    PendingTimersQuery,
    TimerAnswer,
    TimerBody,
    TimerList,
    TimerOperation,
    TimerResult,
    TimersQuery,
    TimerView,
    check_timer_key,
    decode_timers,
)

routes = RouteTable("State")


def _by_queues(queues_of: Callable[[Any], Iterable[str]]) -> Placement:
    """On the shard of the queues of a body, which has to be one."""

    async def place(shards: ShardRouter, invoke: Invoke, call: Call[None, Any]) -> Any:
        names = [Name.queue(queue) for queue in queues_of(call.body)]

        async def find() -> int:
            return await shards.one_shard(names, [], "the request")

        return await shards.placed(find, lambda shard: invoke(shard, call))

    return Custom(place)


@routes.on_shard(
    "POST",
    "/api/v1/kv",
    access=Access.READ_WRITE,
    names=names.kv,
    of_groups=False,
    placement=_by_queues(namespaces_of),
    id="kv",
    summary="Read and write keys",
    description="The operations happen in order and in one transaction. A write that does not apply is no error: its "
    "result says why, and what the key holds. A key that has expired does not exist.",
    body=KvBody,
    decode=decode_kv,
    body_example={
        "operations": [
            {"op": "putIfAbsent", "ns": "orders", "key": "order-1", "value": {"state": "held"}, "ttlSeconds": 60}
        ]
    },
    returns={200: KvAnswer},
    errors=DATABASE,
)
async def kv(shard: Shard, call: Call[None, list[KvOperation]]) -> KvAnswer:
    return await shard.broker.key_values.run(call.body)


@routes.on_shard(
    "GET",
    "/api/v1/kv",
    access=Access.READ_ONLY,
    of_groups=False,
    placement=Paged("namespaces", lambda one: one.namespace, newest_first=False),
    id="kvNamespaces",
    summary="The namespaces that have keys",
    query=KvNamespacesQuery,
    returns={200: KvNamespaces},
    errors=DATABASE,
)
async def kv_namespaces(shard: Shard, call: Call[KvNamespacesQuery, None]) -> KvNamespaces:
    query = call.query
    return await shard.broker.key_values.namespaces(query.search, query.limit, query.offset)


@routes.on_shard(
    "GET",
    "/api/v1/kv/{namespace}",
    access=Access.READ_ONLY,
    names=names.kv_namespace,
    of_groups=False,
    placement=by_queue("namespace"),
    id="kvKeys",
    summary="The keys of a namespace",
    query=PrefixPage,
    returns={200: KvList},
    errors=DATABASE,
)
async def kv_keys(shard: Shard, call: Call[PrefixPage, None]) -> KvList:
    query = call.query
    return await shard.broker.key_values.page(call.name("namespace"), query.prefix, query.limit, query.offset)


@routes.on_shard(
    "GET",
    "/api/v1/kv/{namespace}/{key}",
    access=Access.READ_ONLY,
    names=names.kv_namespace,
    of_groups=False,
    placement=by_queue("namespace"),
    id="kvEntry",
    summary="A key with its value",
    returns={200: KvRow},
    errors=FOUND,
)
async def kv_entry(shard: Shard, call: Call[None, None]) -> KvRow:
    namespace, key = call.name("namespace"), call.params["key"]
    check_key(key, "<key> in the path")
    return await shard.broker.key_values.entry(namespace, key)


@routes.on_shard(
    "POST",
    "/api/v1/locks",
    access=Access.READ_WRITE,
    names=names.locks,
    of_groups=False,
    placement=_by_queues(lambda operations: [NAMESPACE]),
    id="locks",
    summary="Acquire, renew and release locks",
    description="A permit expires unless it is renewed, and its holder is not notified: put its `guard` at `kv` of a "
    "transaction, which then happens only while the permit is held.",
    body=LockBody,
    decode=decode_locks,
    body_example={"operations": [{"op": "acquire", "name": "daily-report", "ttlSeconds": 30, "owner": "worker-1"}]},
    returns={200: LockAnswer},
    errors=DATABASE,
)
async def locks(shard: Shard, call: Call[None, list[LockOperation]]) -> LockAnswer:
    return await shard.broker.locks.run(call.body)


@routes.on_shard(
    "GET",
    "/api/v1/locks",
    access=Access.READ_ONLY,
    names=names.locks,
    of_groups=False,
    placement=_by_queues(lambda body: [NAMESPACE]),
    id="heldLocks",
    summary="The locks that are held",
    description="One entry for each permit, with its holder; `prefix` is of their names.",
    query=PrefixPage,
    returns={200: LockList},
    errors=DATABASE,
)
async def held_locks(shard: Shard, call: Call[PrefixPage, None]) -> LockList:
    return await shard.broker.locks.page(call.query.prefix, call.query.limit, call.query.offset)


@routes.on_shard(
    "GET",
    "/api/v1/timers",
    access=Access.READ_ONLY,
    names=names.by_query("queue"),
    of_groups=False,
    placement=Paged("timers", lambda one: (one.deliver_at, one.queue, one.timer_key), newest_first=False),
    id="pendingTimers",
    summary="The pending timers, the next to be due first",
    query=PendingTimersQuery,
    returns={200: PendingTimers},
    errors=DATABASE,
)
async def pending_timers(shard: Shard, call: Call[PendingTimersQuery, None]) -> PendingTimers:
    query = call.query
    return await shard.broker.timers.pending(query.queue, query.prefix, query.limit, query.offset)


@routes.on_shard(
    "POST",
    "/api/v1/timers",
    access=Access.READ_WRITE,
    names=names.timers,
    of_groups=False,
    placement=_by_queues(lambda operations: {one.queue for one in operations}),
    id="scheduleTimers",
    summary="Schedule and cancel timers",
    description="A timer pushes its message when it is due, not before, and once; until then it can be replaced by one "
    "of the same key, or cancelled.",
    body=TimerBody,
    decode=decode_timers,
    body_example={
        "operations": [
            {"op": "schedule", "queue": "orders", "timerKey": "order-7", "payload": "eyJvcmRlciI6N30=", "delayMs": 1000}
        ]
    },
    returns={200: TimerAnswer},
    errors=SEALED,
)
async def timers(shard: Shard, call: Call[None, list[TimerOperation]]) -> TimerAnswer:
    return await shard.broker.timers.run(call.body, call.request.subject)


@routes.on_shard(
    "GET",
    "/api/v1/timers/{queue}",
    access=Access.READ_ONLY,
    of_groups=False,
    placement=by_queue(),
    id="listTimers",
    summary="The pending timers of a queue",
    query=TimersQuery,
    returns={200: TimerList},
    errors=DATABASE,
)
async def list_timers(shard: Shard, call: Call[TimersQuery, None]) -> TimerList:
    return await shard.broker.timers.page(call.name("queue"), call.query.after, call.query.limit)


@routes.on_shard(
    "GET",
    "/api/v1/timers/{queue}/{timer}",
    access=Access.READ_ONLY,
    of_groups=False,
    placement=by_queue(),
    id="timer",
    summary="A pending timer",
    returns={200: TimerView},
    errors=SEALED,
)
async def timer(shard: Shard, call: Call[None, None]) -> TimerView:
    return await shard.broker.timers.peek(call.name("queue"), _timer_key(call))


@routes.on_shard(
    "DELETE",
    "/api/v1/timers/{queue}/{timer}",
    access=Access.READ_WRITE,
    of_groups=False,
    placement=by_queue(),
    id="cancelTimer",
    summary="Cancel a timer",
    description="`absent` means that none is pending: it may have fired already.",
    query=CancelQuery,
    returns={200: TimerResult},
    errors=DATABASE,
)
async def cancel_timer(shard: Shard, call: Call[CancelQuery, None]) -> TimerResult:
    cancel = Cancel(call.name("queue"), _timer_key(call), call.query.txn)
    return (await shard.broker.timers.run([cancel])).results[0]


def _timer_key(call: Call[Any, Any]) -> str:
    key = call.params["timer"]
    check_timer_key(key, "<timer> in the path")
    return key
