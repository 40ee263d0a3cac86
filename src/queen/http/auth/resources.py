"""Which queues, topics, namespaces and groups a request names, and whether its token permits all of them.

Only requests of tokens that are limited to some of them are checked. A request that names none covers all of them,
and is refused: a route that does not declare what it names is closed to such tokens, never open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from queen.errors import Forbidden
from queen.http.auth.browser import takes_messages
from queen.http.auth.names import Named, NameReader
from queen.http.auth.principal import Principal
from queen.http.server.message import Access, Request, Route
from queen.log.catalog import namespace_and_task


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


class Declared(Protocol):
    """What is read here of the declaration of a route."""

    @property
    def names(self) -> NameReader | None:
        """Reads what a request names beyond its path."""

    @property
    def of_groups(self) -> bool:
        """Whether a request that names no consumer group concerns all of them."""

    @property
    def of_topics(self) -> bool:
        """Whether mqueue's scopes decide about it."""


class Refused(Forbidden):
    """The token does not permit something that the request names; the text says what."""


def is_about_topics(route: Route) -> bool:
    """Whether mqueue's scopes decide about a route."""
    declared: Declared | None = route.declaration
    return declared is not None and declared.of_topics


def named_by(request: Request, route: Route) -> Named:
    """What a request names in its path, its query and its body. Raises `BadRequest` as the handler would."""
    named, params = Named(), request.params
    if "queue" in params:
        named.queues.add(params["queue"])
    elif "partition" in params:
        named.partitions.add(params["partition"])
    if "group" in params:
        named.groups.add(params["group"])
    declared: Declared = route.declaration
    if declared.names is not None:
        declared.names(request, named)
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
        if not named.groups and route.declaration.of_groups:
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
    if about_topics and takes_messages(route):
        # In mqueue's scopes, reading a topic includes dequeueing from it.
        needed = Access.READ_ONLY
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
