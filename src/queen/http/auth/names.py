"""What a request names: queues, topics, namespaces, consumer groups.

Tokens that are limited to some names are checked for all that a request names (`queen.http.auth.resources`). A route
declares which of the readers here is its own, unless its path says all; a body is decoded as its handler does, so that
both see the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from queen.errors import BadRequest
from queen.http.server.message import Request
from queen.log.catalog import QUEUE_MODE
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
    ModeBody,
    QuotaBody,
    TopicName,
    decode_enqueue,
    decode_names,
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


NameReader: TypeAlias = Callable[[Request, Named], object]


def popped(request: Request, named: Named) -> None:
    query = request.query
    named.groups.add(query.get("consumerGroup") or QUEUE_MODE)
    if "queue" not in request.params and query.get("namespace"):
        named.namespaces.add(query["namespace"])


def pushed(request: Request, named: Named) -> None:
    body = request.body
    named.add_items((decode_binary_push if body.startswith(MAGIC) else decode_push)(body).items)
    named.may_name_none = True


def acked(request: Request, named: Named) -> None:
    item, group = decode_ack(request.body)
    named.partitions.add(item.partition_id)
    named.groups.add(group or QUEUE_MODE)


def acked_batch(request: Request, named: Named) -> None:
    items, group = decode_ack_batch(request.body)
    named.partitions.update(item.partition_id for item in items)
    named.groups.add(group or QUEUE_MODE)
    named.may_name_none = True


def transaction(request: Request, named: Named) -> None:
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


def kv(request: Request, named: Named) -> None:
    """A token that is limited to queues may use the namespaces of the same names."""
    named.may_name_none = True
    named.queues.update(namespaces_of(decode_kv(request.body)))


def kv_namespace(request: Request, named: Named) -> None:
    named.queues.add(request.params["namespace"])


def locks(request: Request, named: Named) -> None:
    """All locks are keys of one namespace."""
    named.queues.add(NAMESPACE)


def timers(request: Request, named: Named) -> None:
    named.may_name_none = True
    named.queues.update(operation.queue for operation in decode_timers(request.body))


def queue_in_body(request: Request, named: Named) -> dict[str, Any]:
    """Returns the body, which names one queue."""
    body = decode_object(request.body)
    queue = optional_str(body, "queue")
    if not queue:
        raise BadRequest("queue is required")
    named.queues.add(queue)
    return body


def queue_and_group(request: Request, named: Named) -> None:
    """A token that is limited to queues may use the ephemeral queues of the same names."""
    body = queue_in_body(request, named)
    group = optional_str(body, "group")
    if group:
        named.groups.add(group)


def fetched(request: Request, named: Named) -> None:
    named.queues.update(entry.queue for entry in decode_fetch(request.body).entries)


def changed(request: Request, named: Named) -> None:
    named.queues.update(entry.queue for entry in decode_changed(request.body).entries)


def lease(request: Request, named: Named) -> None:
    named.leases.add(request.params["lease"])


def configured(request: Request, named: Named) -> None:
    body = queue_in_body(request, named)
    # Without one the queue would be in no namespace.
    named.namespaces.add(optional_str(body, "namespace") or "")


def dead_letters(request: Request, named: Named) -> None:
    body = decode_object(request.body) if request.body else {}
    if queue := optional_str(body, "queue"):
        named.queues.add(queue)
    if group := optional_str(body, "consumerGroup"):
        named.groups.add(group)


def bulk_dead_letters(request: Request, named: Named) -> None:
    body = queue_in_body(request, named)
    named.groups.add(optional_str(body, "consumerGroup") or QUEUE_MODE)


def given_up(request: Request, named: Named) -> None:
    body = decode_object(request.body) if request.body else {}
    named.groups.add(request.query.get("consumerGroup") or optional_str(body, "consumerGroup") or QUEUE_MODE)


def traced(request: Request, named: Named) -> None:
    body = decode_object(request.body)
    if partition := optional_str(body, "partitionId"):
        named.partitions.add(partition)
    named.groups.add(optional_str(body, "consumerGroup") or QUEUE_MODE)


def staged(request: Request, named: Named) -> None:
    stage, items = decode_stage(request.body)
    # With messages for other queues in it, those whose batch it is could no longer publish it.
    named.batches.add((stage.run, stage.batch))
    named.add_items(stage.items)
    named.topics.update((item.namespace, item.topic) for item in items)


def published(request: Request, named: Named) -> None:
    publish = decode_publish(request.body)
    named.batches.add((publish.run, publish.batch))


def abandoned(request: Request, named: Named) -> None:
    ref = decode_batch_ref(request.body)
    named.batches.add((ref.run, ref.batch))


def registered(request: Request, named: Named) -> None:
    registration = decode_registration(request.body)
    # A name that is taken also names the queues of its present registration.
    named.stream_names.add(registration.name)
    named.queues.add(registration.source_queue)
    if registration.sink_queue:
        named.queues.add(registration.sink_queue)


def cycle(request: Request, named: Named) -> None:
    cycle = decode_cycle(request.body)
    named.streams.add(cycle.query_id)
    named.partitions.add(cycle.partition_id)
    named.add_items(cycle.items)
    if cycle.group:
        named.groups.add(cycle.group)


def stream_state(request: Request, named: Named) -> None:
    query = decode_state_query(request.body)
    named.streams.add(query.query_id)
    named.partitions.add(query.partition_id)


def enqueued(request: Request, named: Named) -> None:
    named.topics.update((item.namespace, item.topic) for item in decode_enqueue(request.body))


def topics_in_query(request: Request, named: Named) -> None:
    """`topic`, or `topics`, a JSON array of names; without either all topics of the namespace."""
    query = request.query
    names: list[str | None] = [*decode_names(query.get("topics", ""))] or [query.get("topic") or None]
    named.topics.update((query["namespace"], name) for name in names if query.get("namespace"))


def refs(decode: Callable[[bytes], tuple[Sequence[ItemRef], bool]]) -> NameReader:
    def read(request: Request, named: Named) -> None:
        named.topics.update((ref.namespace, ref.topic) for ref in decode(request.body)[0])

    return read


def topic(decode: Callable[[bytes], TopicName]) -> NameReader:
    def read(request: Request, named: Named) -> None:
        name = decode(request.body)
        named.topics.add((name.namespace, name.topic))

    return read


def topics_of_namespace(decode: Callable[[bytes], QuotaBody | ModeBody]) -> NameReader:
    def read(request: Request, named: Named) -> None:
        named.topics.add((decode(request.body).namespace, None))

    return read


def each_subscription(request: Request, named: Named) -> None:
    named.may_name_none = True  # each subscription is checked when it is requested


def by_query(*keys: str) -> NameReader:
    """The view is of nothing but what these parameters name."""

    def read(request: Request, named: Named) -> None:
        kinds = {"queue": named.queues, "group": named.groups, "consumerGroup": named.groups}
        for key in keys:
            value = request.query.get(key)
            if value:
                kinds.get(key, named.namespaces).add(value)

    return read


_dead_letters_by_query = by_query("queue", "consumerGroup")


def purged(request: Request, named: Named) -> None:
    """A body replaces the query."""
    (dead_letters if request.body else _dead_letters_by_query)(request, named)
