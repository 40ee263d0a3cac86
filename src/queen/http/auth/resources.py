"""Which queues, topics, namespaces and groups a request names, and whether its bearer may touch all of them.

Only requests of tokens that are limited to some of them are looked at. A request that names none covers all of them,
and is refused: a route that is forgotten here is closed to such tokens, never open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from queen.errors import BadRequest, Forbidden
from queen.http.auth.principal import Principal
from queen.http.server.message import Access, Request, Route
from queen.log.catalog import QUEUE_MODE, namespace_and_task
from queen.wire.ack import decode_ack, decode_ack_batch, decode_object, optional_str
from queen.wire.api.messages.reading import decode_changed, decode_fetch
from queen.wire.api.messages.stages import decode_batch_ref, decode_publish, decode_stage
from queen.wire.api.resources.streams import decode_cycle, decode_registration, decode_state_query
from queen.wire.binary.push import MAGIC, decode_binary_push
from queen.wire.push import PushItem, decode_push
from queen.wire.state.kv import decode_kv, namespaces_of
from queen.wire.state.locks import NAMESPACE
from queen.wire.state.timers import decode_timers
from queen.wire.topics.requests import (
    ItemRef,
    decode_acks,
    decode_configure,
    decode_enqueue,
    decode_extends,
    decode_mode,
    decode_nacks,
    decode_names,
    decode_quota,
    decode_topic,
)
from queen.wire.transaction import (
    AckItemOperation,
    AckOperation,
    EnqueueOperation,
    KvRider,
    PushOperation,
    TimerRider,
    decode_transaction,
)

_TOPICS: Final = "/api/v1/topics"
_SHORT_TOPIC_PATHS: Final = frozenset(
    {"/enqueue", "/dequeue", "/ack", "/nack", "/topics", "/dlq", "/dlq/delete", "/dlq/retry"}
)
# These neither show consumer groups nor move them. All other requests that name no group concern all of them.
_WITHOUT_GROUPS: Final = frozenset(
    {
        "POST /api/v1/push",
        "POST /api/v1/transaction",
        # Of a lease the group is looked up.
        "POST /api/v1/lease/{lease}/extend",
        "GET /ws/v1/consume",
        "POST /api/v1/configure",
        "GET /api/v1/resources/queues",
        "GET /api/v1/resources/queues/{queue}",
        "GET /api/v1/resources/partitions",
        "GET /api/v1/resources/namespaces",
        "GET /api/v1/resources/tasks",
        "GET /api/v1/resources/overview",
        "GET /api/v1/messages",
        "GET /api/v1/messages/search",
        "POST /api/v1/messages/delete",
        "DELETE /api/v1/messages/{partition}/{transaction}",
        "GET /api/v1/read/{queue}",
        "GET /api/v1/read/{queue}/partition/{partition}",
        "POST /api/v1/fetch",
        "POST /api/v1/partitions/changed",
        "POST /api/v1/ephemeral/push",
        "POST /api/v1/kv",
        "GET /api/v1/kv",
        "GET /api/v1/kv/{namespace}",
        "GET /api/v1/kv/{namespace}/{key}",
        "POST /api/v1/locks",
        "GET /api/v1/locks",
        "POST /api/v1/timers",
        "GET /api/v1/timers",
        "GET /api/v1/timers/{queue}",
        "GET /api/v1/timers/{queue}/{timer}",
        "DELETE /api/v1/timers/{queue}/{timer}",
        "GET /api/v1/analytics/queue-lag",
        "GET /api/v1/analytics/queue-ops",
        "GET /api/v1/analytics/queue-parked-replicas",
        "GET /api/v1/analytics/retention",
        "POST /api/v1/stages",
        "POST /api/v1/stages/publish",
        "POST /api/v1/stages/abandon",
        "POST /streams/v1/queries",
        "POST /streams/v1/state/get",
    }
)
# Elsewhere a group in the query is not read, and says nothing about what is done.
_GROUP_IN_QUERY: Final = frozenset(
    {
        "GET /api/v1/dlq",
        "DELETE /api/v1/dlq",
        "GET /api/v1/dlq/report",
        "POST /api/v1/messages/{partition}/{transaction}/dlq",
    }
)


class QueueLookup(Protocol):
    """What is known of queues besides their names."""

    async def namespace_of(self, queue: str) -> str | None:
        """The namespace a queue is in; None when there is no such queue."""

    async def queues_of_partition(self, partition_id: str) -> Iterable[str]:
        """The queue of a partition; none when there is no such partition."""

    async def queues_of_lease(self, lease_id: str) -> Iterable[str]:
        """The queue of the partition that a lease is of; none when there is no such partition."""

    async def groups_of_lease(self, lease_id: str) -> Iterable[str]:
        """The consumer group that holds a lease; none when the lease has ended."""

    async def queues_of_batch(self, run: str, batch: int) -> Iterable[str] | None:
        """The queues that messages were staged for; None when it cannot be said, because items of topics were."""

    async def queues_of_stream(self, query_id: str) -> Iterable[str]:
        """The queues that a streaming query reads and writes."""

    async def queues_of_stream_named(self, name: str) -> Iterable[str]:
        """The same of a query by its name; none when there is no such query."""


@dataclass(slots=True)
class Named:
    """What a request names. A topic without a name stands for all topics of its namespace."""

    queues: set[str] = field(default_factory=set)
    topics: set[tuple[str, str | None]] = field(default_factory=set)
    namespaces: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    partitions: set[str] = field(default_factory=set)
    leases: set[str] = field(default_factory=set)
    batches: set[tuple[str, int]] = field(default_factory=set)
    streams: set[str] = field(default_factory=set)
    stream_names: set[str] = field(default_factory=set)
    may_name_none: bool = False
    """A request without names is not for all queues: its list is empty, or its items are checked one by one."""

    @property
    def is_specific(self) -> bool:
        return bool(
            self.may_name_none
            or self.queues
            or self.topics
            or self.namespaces
            or self.partitions
            or self.leases
            or self.batches
            or self.streams
        )

    def add_items(self, items: Iterable[PushItem]) -> None:
        self.queues.update(item.queue for item in items)


class Refused(Forbidden):
    """What a request names is not for its bearer; the text says what of it."""


def is_about_topics(route: Route) -> bool:
    """Whether mqueue's scopes decide about a route."""
    pattern = route.pattern
    return pattern in _SHORT_TOPIC_PATHS or pattern == _TOPICS or pattern.startswith(_TOPICS + "/")


def named_by(request: Request, route: Route) -> Named:
    """What a request names in its path, its query and its body. Raises `BadRequest` as the handler would."""
    named = Named()
    params, query = request.params, request.query
    if "queue" in params:
        named.queues.add(params["queue"])
    elif "partition" in params:
        named.partitions.add(params["partition"])
    key = f"{route.method} {route.pattern}"
    if "group" in params:
        named.groups.add(params["group"])
    if route.pattern.startswith("/api/v1/pop"):
        named.groups.add(query.get("consumerGroup") or QUEUE_MODE)
    elif key in _GROUP_IN_QUERY and query.get("consumerGroup"):
        named.groups.add(query["consumerGroup"])
    reader = READERS.get(key)
    if reader is not None:
        reader(request, named)
    return named


async def check(principal: Principal, route: Route, named: Named, lookup: QueueLookup) -> None:
    """Raises `Refused` unless all that is named is within the limits of the bearer."""
    check_scopes(principal, route, named)
    if not principal.is_limited:
        return
    if not named.is_specific and (principal.queues is not None or principal.namespaces is not None):
        raise Refused("this request concerns all queues: name one that the token allows")
    if principal.groups is not None:
        for group in named.groups:
            if not principal.groups.admits(group):
                raise Refused(f"the token is not for the consumer group {group!r}")
        if not named.groups and not is_about_topics(route) and f"{route.method} {route.pattern}" not in _WITHOUT_GROUPS:
            raise Refused("this request concerns all consumer groups: name one that the token allows")
        for lease in named.leases:
            if not all(map(principal.groups.admits, await lookup.groups_of_lease(lease))):
                raise Refused("the token is not for the consumer group that holds the lease")
    if principal.queues is None and principal.namespaces is None:
        return
    for namespace, topic in named.topics:
        _check_topic(principal, namespace, topic)
    for namespace in named.namespaces:
        if principal.queues is not None and not named.queues:
            raise Refused(f"the token is not for all queues of the namespace {namespace!r}")
        _check_namespace(principal, namespace)
    for queue in named.queues:
        await _check_queue(principal, queue, lookup)
    for partition in named.partitions:
        await _check_found(principal, await lookup.queues_of_partition(partition), "the partition", lookup)
    for lease in named.leases:
        await _check_found(principal, await lookup.queues_of_lease(lease), "the lease", lookup)
    for run, batch in named.batches:
        queues = await lookup.queues_of_batch(run, batch)
        if queues is None:
            raise Refused("the batch holds topic items, which cannot be checked one by one")
        await _check_found(principal, queues, "the batch", lookup)
    for stream in named.streams:
        await _check_found(principal, await lookup.queues_of_stream(stream), "the streaming query", lookup)
    for name in named.stream_names:
        await _check_found(principal, await lookup.queues_of_stream_named(name), "the streaming query", lookup)


def check_scopes(principal: Principal, route: Route, named: Named) -> None:
    """Raises `Refused` where the scopes of mqueue do not admit what is done to topics."""
    if principal.scopes is None or principal.access is Access.ADMIN:
        return
    about_topics = is_about_topics(route)
    needed = route.access if about_topics else Access.READ_WRITE
    for namespace, _ in named.topics:
        if not principal.may_use_topics(namespace, needed):
            raise Refused(f"the scopes of the token do not admit this for the namespace {namespace!r}")
    if about_topics and not named.topics:
        raise Refused("this request has to name a namespace that the scopes of the token admit")


class ConsumerLimits:
    """What the bearer of a token may consume over one connection; each request on it is checked."""

    def __init__(self, principal: Principal, lookup: QueueLookup, on_refused: Callable[[str], None]) -> None:
        """`on_refused` is called with the reason when something on the connection was refused."""
        self._principal = principal
        self._lookup = lookup
        self.on_refused = on_refused
        self.is_limited = principal.is_limited

    @property
    def expired(self) -> bool:
        return self._principal.has_ended

    async def check_subscription(self, queue: str, group: str) -> None:
        """Raises `Refused` where the queue or the group is not for the bearer."""
        self.check_group(group)
        await _check_queue(self._principal, queue, self._lookup)

    def check_group(self, group: str) -> None:
        groups = self._principal.groups
        if groups is not None and not groups.admits(group):
            raise Refused(f"the token is not for the consumer group {group!r}")


async def _check_found(principal: Principal, queues: Iterable[str], of: str, lookup: QueueLookup) -> None:
    """The same for queues that the request does not name itself: a refusal must not say what they are called."""
    for queue in queues:
        try:
            await _check_queue(principal, queue, lookup)
        except Refused:
            raise Refused(f"the token is not for the queue of {of}") from None


async def _check_queue(principal: Principal, queue: str, lookup: QueueLookup) -> None:
    if principal.queues is not None and not principal.queues.admits(queue):
        raise Refused(f"the token is not for the queue {queue!r}")
    if principal.namespaces is not None:
        namespace = await lookup.namespace_of(queue)
        # A queue that is yet to be made will be in the namespace that its name begins with.
        _check_namespace(principal, namespace_and_task(queue)[0] if namespace is None else namespace)


def _check_topic(principal: Principal, namespace: str, topic: str | None) -> None:
    _check_namespace(principal, namespace)
    if principal.queues is None:
        return
    if topic is None:
        raise Refused(f"the token is not for all topics of the namespace {namespace!r}")
    if not principal.queues.admits(topic):
        raise Refused(f"the token is not for the topic {topic!r}")


def _check_namespace(principal: Principal, namespace: str) -> None:
    if principal.namespaces is not None and not principal.namespaces.admits(namespace):
        raise Refused(f"the token is not for the namespace {namespace!r}")


# What bodies name. Each is decoded as its handler does, so that both see the same.


def _push(request: Request, named: Named) -> None:
    body = request.body
    named.add_items((decode_binary_push if body.startswith(MAGIC) else decode_push)(body).items)
    named.may_name_none = True


def _ack(request: Request, named: Named) -> None:
    item, group = decode_ack(request.body)
    named.partitions.add(item.partition_id)
    named.groups.add(group or QUEUE_MODE)


def _ack_batch(request: Request, named: Named) -> None:
    items, group = decode_ack_batch(request.body)
    named.partitions.update(item.partition_id for item in items)
    named.groups.add(group or QUEUE_MODE)
    named.may_name_none = True


def _transaction(request: Request, named: Named) -> None:
    named.may_name_none = True
    for operation in decode_transaction(request.body):
        if isinstance(operation, PushOperation):
            named.queues.add(operation.item.queue)
        elif isinstance(operation, AckOperation):
            named.partitions.add(operation.partition_id)
            named.groups.add(operation.group or QUEUE_MODE)
        elif isinstance(operation, EnqueueOperation):
            named.topics.add((operation.item.namespace, operation.item.topic))
        elif isinstance(operation, AckItemOperation):
            named.topics.add((operation.ref.namespace, operation.ref.topic))
        elif isinstance(operation, KvRider):
            named.queues.add(operation.operation.ns)
        elif isinstance(operation, TimerRider):
            named.queues.add(operation.operation.queue)


def _kv(request: Request, named: Named) -> None:
    """A token that is limited to queues may use the namespaces of the same names."""
    named.may_name_none = True
    named.queues.update(namespaces_of(decode_kv(request.body)))


def _kv_namespace(request: Request, named: Named) -> None:
    named.queues.add(request.params["namespace"])


def _locks(request: Request, named: Named) -> None:
    """All locks are keys of one namespace."""
    named.queues.add(NAMESPACE)


def _timers(request: Request, named: Named) -> None:
    named.may_name_none = True
    named.queues.update(operation.queue for operation in decode_timers(request.body))


def _with_queue(request: Request, named: Named) -> dict[str, Any]:
    """A body that names its one queue."""
    body = decode_object(request.body)
    queue = optional_str(body, "queue")
    if not queue:
        raise BadRequest("queue is required")
    named.queues.add(queue)
    return body


def _queue_in_body(request: Request, named: Named) -> None:
    """A token that is limited to queues may use the ephemeral queues of the same names."""
    body = _with_queue(request, named)
    group = optional_str(body, "group")
    if group:
        named.groups.add(group)


def _fetch(request: Request, named: Named) -> None:
    named.queues.update(entry.queue for entry in decode_fetch(request.body).entries)


def _changed(request: Request, named: Named) -> None:
    named.queues.update(entry.queue for entry in decode_changed(request.body).entries)


def _lease(request: Request, named: Named) -> None:
    named.leases.add(request.params["lease"])


def _configure(request: Request, named: Named) -> None:
    body = _with_queue(request, named)
    # Without one the queue would be in no namespace.
    named.namespaces.add(optional_str(body, "namespace") or "")


def _dead_letters(request: Request, named: Named) -> None:
    body = decode_object(request.body) if request.body else {}
    if queue := optional_str(body, "queue"):
        named.queues.add(queue)
    if group := optional_str(body, "consumerGroup"):
        named.groups.add(group)


def _bulk(request: Request, named: Named) -> None:
    """Messages of other queues than the one that is named are not found."""
    queue = optional_str(decode_object(request.body), "queue")
    if not queue:
        raise BadRequest("queue is required")
    named.queues.add(queue)


def _bulk_dead_letters(request: Request, named: Named) -> None:
    _bulk(request, named)
    named.groups.add(optional_str(decode_object(request.body), "consumerGroup") or QUEUE_MODE)


def _give_up(request: Request, named: Named) -> None:
    body = decode_object(request.body) if request.body else {}
    named.groups.add(request.query.get("consumerGroup") or optional_str(body, "consumerGroup") or QUEUE_MODE)


def _trace(request: Request, named: Named) -> None:
    body = decode_object(request.body)
    if partition := optional_str(body, "partitionId"):
        named.partitions.add(partition)
    named.groups.add(optional_str(body, "consumerGroup") or QUEUE_MODE)


def _stage(request: Request, named: Named) -> None:
    stage, items = decode_stage(request.body)
    # With messages for other queues in it, those whose batch it is could no longer publish it.
    named.batches.add((stage.run, stage.batch))
    named.add_items(stage.items)
    named.topics.update((item.namespace, item.topic) for item in items)


def _publish(request: Request, named: Named) -> None:
    publish = decode_publish(request.body)
    named.batches.add((publish.run, publish.batch))


def _abandon(request: Request, named: Named) -> None:
    ref = decode_batch_ref(request.body)
    named.batches.add((ref.run, ref.batch))


def _register(request: Request, named: Named) -> None:
    registration = decode_registration(request.body)
    # A name that is taken also names the queues of its present registration.
    named.stream_names.add(registration.name)
    named.queues.add(registration.source_queue)
    if registration.sink_queue:
        named.queues.add(registration.sink_queue)


def _cycle(request: Request, named: Named) -> None:
    cycle = decode_cycle(request.body)
    named.streams.add(cycle.query_id)
    named.partitions.add(cycle.partition_id)
    named.add_items(cycle.items)
    if cycle.group:
        named.groups.add(cycle.group)


def _state(request: Request, named: Named) -> None:
    query = decode_state_query(request.body)
    named.streams.add(query.query_id)
    named.partitions.add(query.partition_id)


def _enqueue(request: Request, named: Named) -> None:
    named.topics.update((item.namespace, item.topic) for item in decode_enqueue(request.body))


def _dequeue(request: Request, named: Named) -> None:
    """`topic`, or `topics`, a JSON array of names; without either all topics of the namespace."""
    query = request.query
    names: list[str | None] = [*decode_names(query.get("topics", ""))] or [query.get("topic") or None]
    named.topics.update((query["namespace"], name) for name in names if query.get("namespace"))


def _refs(decode: Callable[[bytes], tuple[Sequence[ItemRef], bool]]) -> BodyReader:
    def read(request: Request, named: Named) -> None:
        named.topics.update((ref.namespace, ref.topic) for ref in decode(request.body)[0])

    return read


def _topic(request: Request, named: Named) -> None:
    name = decode_topic(request.body)
    named.topics.add((name.namespace, name.topic))


def _configure_topic(request: Request, named: Named) -> None:
    name = decode_configure(request.body)
    named.topics.add((name.namespace, name.topic))


def _quota(request: Request, named: Named) -> None:
    named.topics.add((decode_quota(request.body).namespace, None))


def _mode(request: Request, named: Named) -> None:
    named.topics.add((decode_mode(request.body).namespace, None))


def _connect(request: Request, named: Named) -> None:
    named.may_name_none = True  # each subscription is checked when it is requested


def _by_query(*keys: str) -> BodyReader:
    """The view is of nothing but what these parameters name."""

    def read(request: Request, named: Named) -> None:
        for key in keys:
            value = request.query.get(key)
            if value:
                {"queue": named.queues, "group": named.groups}.get(key, named.namespaces).add(value)

    return read


def _purged(request: Request, named: Named) -> None:
    """A body replaces the query."""
    if request.body:
        named.groups.clear()
        _dead_letters(request, named)
    else:
        _by_query("queue")(request, named)


BodyReader = Callable[[Request, Named], None]

READERS: Final[Mapping[str, BodyReader]] = {
    "POST /api/v1/push": _push,
    "GET /api/v1/pop": _by_query("namespace"),
    "POST /api/v1/ack": _ack,
    "POST /api/v1/ack/batch": _ack_batch,
    "POST /api/v1/transaction": _transaction,
    "POST /api/v1/lease/{lease}/extend": _lease,
    "GET /ws/v1/consume": _connect,
    "POST /api/v1/configure": _configure,
    "GET /api/v1/resources/queues": _by_query("namespace"),
    "GET /api/v1/resources/partitions": _by_query("queue"),
    "GET /api/v1/status/queues": _by_query("namespace"),
    "GET /api/v1/messages": _by_query("queue", "ns"),
    "GET /api/v1/messages/search": _by_query("queue"),
    "POST /api/v1/messages/delete": _bulk,
    "POST /api/v1/messages/retry": _bulk,
    "POST /api/v1/messages/dlq": _bulk_dead_letters,
    "POST /api/v1/messages/{partition}/{transaction}/dlq": _give_up,
    "POST /api/v1/kv": _kv,
    "GET /api/v1/kv/{namespace}": _kv_namespace,
    "GET /api/v1/kv/{namespace}/{key}": _kv_namespace,
    "POST /api/v1/locks": _locks,
    "GET /api/v1/locks": _locks,
    "POST /api/v1/timers": _timers,
    "GET /api/v1/timers": _by_query("queue"),
    "POST /api/v1/ephemeral/configure": _queue_in_body,
    "POST /api/v1/ephemeral/push": _queue_in_body,
    "POST /api/v1/ephemeral/ack": _queue_in_body,
    "POST /api/v1/ephemeral/reset": _queue_in_body,
    "GET /api/v1/ephemeral/pop": _by_query("queue", "group"),
    "POST /api/v1/fetch": _fetch,
    "POST /api/v1/partitions/changed": _changed,
    "GET /api/v1/resources/queues/{queue}/depth": _by_query("group"),
    "GET /api/v1/dlq": _by_query("queue"),
    "GET /api/v1/dlq/report": _by_query("queue"),
    "POST /api/v1/dlq/retry": _dead_letters,
    "DELETE /api/v1/dlq": _purged,
    "GET /api/v1/analytics/queue-lag": _by_query("queue"),
    "GET /api/v1/analytics/queue-ops": _by_query("queue"),
    "GET /api/v1/analytics/queue-parked-replicas": _by_query("queue"),
    "GET /api/v1/analytics/retention": _by_query("queue"),
    "GET /api/v1/analytics/rollup": _by_query("queue", "group"),
    "POST /api/v1/traces": _trace,
    "POST /api/v1/stages": _stage,
    "POST /api/v1/stages/publish": _publish,
    "POST /api/v1/stages/abandon": _abandon,
    "POST /streams/v1/queries": _register,
    "POST /streams/v1/cycle": _cycle,
    "POST /streams/v1/state/get": _state,
    **{
        f"{method} {path}": reader
        for prefix in (_TOPICS, "")
        for method, path, reader in (
            ("POST", f"{prefix}/enqueue", _enqueue),
            ("GET", f"{prefix}/dequeue", _dequeue),
            ("POST", f"{prefix}/ack", _refs(decode_acks)),
            ("POST", f"{prefix}/nack", _refs(decode_nacks)),
            ("GET", prefix or "/topics", _dequeue),
            ("GET", f"{prefix}/dlq", _dequeue),
            ("POST", f"{prefix}/dlq/delete", _refs(decode_acks)),
            ("POST", f"{prefix}/dlq/retry", _refs(decode_acks)),
        )
    },
    f"GET {_TOPICS}/dequeue/many": _dequeue,
    f"POST {_TOPICS}/extend": _refs(decode_extends),
    f"POST {_TOPICS}/release": _refs(decode_acks),
    f"GET {_TOPICS}/peek": _dequeue,
    f"GET {_TOPICS}/counts": _dequeue,
    f"GET {_TOPICS}/priorities": _dequeue,
    f"POST {_TOPICS}/configure": _configure_topic,
    f"POST {_TOPICS}/pause": _topic,
    f"POST {_TOPICS}/resume": _topic,
    f"POST {_TOPICS}/purge": _topic,
    f"DELETE {_TOPICS}": _dequeue,
    f"PUT {_TOPICS}/quotas": _quota,
    f"PUT {_TOPICS}/modes": _mode,
}
"""By `METHOD /pattern`: what a request names beyond the parameters of its path."""
