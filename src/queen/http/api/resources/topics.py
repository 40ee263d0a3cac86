"""Topics: enqueue, dequeue, ack, nack, extend, dead letters, and their administration.

Every route has its place under `/api/v1/topics`; short paths at the root are the same handlers, for clients of mqueue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from queen.broker.topics.buffered import BUFFERED
from queen.broker.topics.settle import NOT_LEASED, Nacked
from queen.errors import NotFound, QueenError
from queen.http.auth import names
from queen.http.routing.call import Call
from queen.http.routing.context import Api, Shard
from queen.http.routing.placement import (
    Custom,
    Everywhere,
    Invoke,
    Paged,
    by_namespace,
    by_topic,
    first_answer,
    sorted_union,
)
from queen.http.routing.route import DATABASE, FOUND, Media, RouteTable
from queen.http.server.message import Access, Request, Response
from queen.log.topics import TopicKey
from queen.metrics.meter import clock
from queen.wire.api.resources.topics import (
    ConfiguredTopic,
    CountsQuery,
    DeletedTopic,
    DequeueManyQuery,
    DequeueQuery,
    ExtendSettled,
    Id,
    IdsQuery,
    Mode,
    NackSettled,
    NamespaceQuery,
    PausedTopic,
    PeekQuery,
    PrioritiesQuery,
    PriorityCounts,
    PurgedTopic,
    Quota,
    Settled,
    TopicCounts,
    TopicDeadLetter,
    TopicDeadLettersQuery,
    TopicItem,
    TopicQuery,
    WriteMode,
)
from queen.wire.shards import Name
from queen.wire.topics.items import render_dead_letters, render_ids, render_items, render_mixed_items
from queen.wire.topics.requests import (
    ConfigureBody,
    EnqueueItem,
    ExtendRef,
    ItemRef,
    ModeBody,
    NackRef,
    PurgeBody,
    QuotaBody,
    TopicName,
    decode_acks,
    decode_configure,
    decode_enqueue,
    decode_extends,
    decode_mode,
    decode_nacks,
    decode_names,
    decode_purge,
    decode_quota,
    decode_topic,
)

routes = RouteTable("Topics", of_topics=True, of_groups=False)

_NATIVE: Final = "/api/v1/topics"
_NOT_DEAD: Final = "Dead letter not found"
_OK: Final = Response(200, b"OK", b"text/plain; charset=utf-8")
_EXAMPLE: Final = {"namespace": "payments", "topic": "refunds", "data": {"order": 7}, "priority": 1, "delay": 30}
_ONE: Final = "One item may be sent without the array."
_SHORT: Final = Media("text/plain")


def _both(method: str, path: str, declare: Callable[..., Any] = routes.direct, **declared: Any) -> Callable[..., Any]:
    """Declare a handler at its native path, and at the short one of mqueue: there single items are settled."""

    def both(handler: Any) -> Any:
        short = dict(declared)
        short["id"] = f"{declared['id']}Short"
        short["summary"] = f"{declared['summary']} (as mqueue does)"
        if declared.get("body") in (list[ItemRef], list[NackRef]):
            short |= {
                "body": NackRef if declared["body"] == list[NackRef] else ItemRef,
                "returns": {200: _SHORT},
                "errors": FOUND,
            }
        declare(method, path.removeprefix(_NATIVE) or "/topics", **short)(handler)
        declare(method, path, **declared)(handler)
        return handler

    return both


@_both(
    "POST",
    f"{_NATIVE}/enqueue",
    access=Access.READ_WRITE,
    names=names.enqueued,
    id="enqueue",
    summary="Enqueue items",
    description="All or none are stored. The answer has the ids in the order of the items; an item whose "
    "`idempotency_key` its namespace has already is not stored again, and answered with the id of the first.",
    query=IdsQuery,
    body=list[EnqueueItem],
    decode=decode_enqueue,
    body_example=[_EXAMPLE],
    returns={200: list[Id]},
    errors=(429, 503),
)
async def enqueue(api: Api, request: Request) -> Response:
    began = clock()
    items = decode_enqueue(request.body)
    ids = await api.broker.topics.writer.enqueue(items)
    _took(api, "enqueue", items, began)
    return Response(200, render_ids(ids, _ids_as_text(request)))


@_both(
    "GET",
    f"{_NATIVE}/dequeue",
    access=Access.READ_WRITE,
    names=names.topics_in_query,
    id="dequeue",
    summary="Lease the next items",
    description="By priority (lower first), then by the time they became due, then by id. Nothing is delivered before "
    "its `deliver_after`. Items that are not acknowledged before their lease expires are redelivered.",
    query=DequeueQuery,
    returns={200: list[TopicItem]},
    errors=DATABASE,
)
async def dequeue(api: Api, request: Request) -> Response:
    query: DequeueQuery = request.args
    key = (query.namespace, query.topic)
    dequeued = api.broker.topics.dequeuer.dequeue(key, *_dequeue_options(api, query))
    request.on_disconnect(dequeued.cancel)
    return Response(200, render_items(await dequeued, *key, _ids_as_text(request)))


@routes.direct(
    "GET",
    f"{_NATIVE}/dequeue/many",
    access=Access.READ_WRITE,
    names=names.topics_in_query,
    id="dequeueMany",
    summary="Lease the next items of several topics",
    description="In one order of service: by priority, then by the time they became due, then by id.",
    query=DequeueManyQuery,
    returns={200: list[TopicItem]},
    errors=DATABASE,
)
async def dequeue_many(api: Api, request: Request) -> Response:
    query: DequeueManyQuery = request.args
    names = decode_names(query.topics)
    dequeued = api.broker.topics.multi_dequeuer.dequeue(query.namespace, names, *_dequeue_options(api, query))
    request.on_disconnect(dequeued.answer.cancel)
    rows = await dequeued.answer
    return Response(200, render_mixed_items(rows, query.namespace, dequeued.topics, _ids_as_text(request)))


@_both(
    "POST",
    f"{_NATIVE}/ack",
    access=Access.READ_WRITE,
    names=names.refs(decode_acks),
    id="ackItems",
    summary="Acknowledge items",
    description=f"They are removed for good. {_ONE}",
    query=IdsQuery,
    body=list[ItemRef],
    decode=decode_acks,
    returns={200: list[Settled]},
    errors=DATABASE,
)
async def ack(api: Api, request: Request) -> Response:
    began = clock()
    refs, several = decode_acks(request.body)
    done = await api.broker.topics.settler.ack(refs)
    _took(api, "ack", _found(refs, done), began)
    return _settled(request, refs, several, done, NOT_LEASED)


@_both(
    "POST",
    f"{_NATIVE}/nack",
    access=Access.READ_WRITE,
    names=names.refs(decode_nacks),
    id="nackItems",
    summary="Report that items failed",
    description="They are redelivered after a backoff that doubles each time, or become dead letters: when their "
    f"retries are used up, or at once with `dlq`. {_ONE}",
    query=IdsQuery,
    body=list[NackRef],
    decode=decode_nacks,
    returns={200: list[NackSettled]},
    errors=DATABASE,
)
async def nack(api: Api, request: Request) -> Response:
    began = clock()
    refs, several = decode_nacks(request.body)
    outcomes = await api.broker.topics.settler.nack(refs)
    _took(api, "nack", _found(refs, outcomes), began)
    return _settled(request, refs, several, outcomes, NOT_LEASED, _nacked)


@routes.direct(
    "POST",
    f"{_NATIVE}/extend",
    access=Access.READ_WRITE,
    names=names.refs(decode_extends),
    id="extendItems",
    summary="Extend the leases of items",
    description=f"So many `seconds` from now, by default as long as a lease of the topic; never shorter. {_ONE}",
    query=IdsQuery,
    body=list[ExtendRef],
    decode=decode_extends,
    returns={200: list[ExtendSettled]},
    errors=DATABASE,
)
async def extend(api: Api, request: Request) -> Response:
    refs, several = decode_extends(request.body)
    ends = await api.broker.topics.settler.extend(refs)
    return _settled(request, refs, several, ends, NOT_LEASED, lambda end: {"lease_expires_at": end})


@routes.direct(
    "POST",
    f"{_NATIVE}/release",
    access=Access.READ_WRITE,
    names=names.refs(decode_acks),
    id="releaseItems",
    summary="Release leased items",
    description=f"They are ready at once, and have not failed: no retry is counted. {_ONE}",
    query=IdsQuery,
    body=list[ItemRef],
    decode=decode_acks,
    returns={200: list[Settled]},
    errors=DATABASE,
)
async def release(api: Api, request: Request) -> Response:
    refs, several = decode_acks(request.body)
    return _settled(request, refs, several, await api.broker.topics.settler.release(refs), NOT_LEASED)


@_both(
    "GET",
    _NATIVE,
    routes.on_shard,
    access=Access.READ_ONLY,
    names=names.topics_in_query,
    placement=Everywhere(sorted_union),
    id="activeTopics",
    summary="List topics that have ready or leased items",
    query=NamespaceQuery,
    returns={200: list[str]},
    errors=DATABASE,
)
async def active(shard: Shard, call: Call[NamespaceQuery, None]) -> list[str]:
    return await shard.broker.topics.admin.active(call.query.namespace)


@_both(
    "GET",
    f"{_NATIVE}/dlq",
    routes.on_shard,
    access=Access.READ_ONLY,
    names=names.topics_in_query,
    placement=by_topic(),
    id="topicDeadLetters",
    summary="List the dead letters of a topic",
    query=TopicDeadLettersQuery,
    returns={200: list[TopicDeadLetter]},
    errors=DATABASE,
)
async def list_dead(shard: Shard, call: Call[TopicDeadLettersQuery, None]) -> Response:
    key = _key(call.query)
    rows = await shard.broker.topics.dead_letters.page(key, call.query.limit, call.query.offset)
    return Response(200, render_dead_letters(rows, *key, _ids_as_text(call.request)))


@_both(
    "POST",
    f"{_NATIVE}/dlq/delete",
    access=Access.READ_WRITE,
    names=names.refs(decode_acks),
    audited=True,
    id="deleteTopicDeadLetters",
    summary="Delete dead letters of topics",
    description=_ONE,
    query=IdsQuery,
    body=list[ItemRef],
    decode=decode_acks,
    returns={200: list[Settled]},
    errors=DATABASE,
)
async def delete_dead(api: Api, request: Request) -> Response:
    refs, several = decode_acks(request.body)
    return _settled(request, refs, several, await api.broker.topics.dead_letters.delete(refs), _NOT_DEAD)


@_both(
    "POST",
    f"{_NATIVE}/dlq/retry",
    access=Access.READ_WRITE,
    names=names.refs(decode_acks),
    audited=True,
    id="retryTopicDeadLetters",
    summary="Retry dead letters of topics",
    description=f"They are ready at once, with no retries used. {_ONE}",
    query=IdsQuery,
    body=list[ItemRef],
    decode=decode_acks,
    returns={200: list[Settled]},
    errors=DATABASE,
)
async def retry_dead(api: Api, request: Request) -> Response:
    refs, several = decode_acks(request.body)
    return _settled(request, refs, several, await api.broker.topics.dead_letters.retry(refs), _NOT_DEAD)


@routes.on_shard(
    "GET",
    f"{_NATIVE}/peek",
    access=Access.READ_ONLY,
    names=names.topics_in_query,
    placement=by_topic(),
    id="peekTopic",
    summary="Show the next items without leasing them",
    query=PeekQuery,
    returns={200: list[TopicItem]},
    errors=DATABASE,
)
async def peek(shard: Shard, call: Call[PeekQuery, None]) -> Response:
    key = _key(call.query)
    asked = call.query
    admin = shard.broker.topics.admin
    rows = await admin.peek(key, asked.limit, asked.offset, delayed=asked.delayed, leased=asked.leased)
    return Response(200, render_items(rows, *key, _ids_as_text(call.request)))


@routes.on_shard(
    "GET",
    f"{_NATIVE}/counts",
    access=Access.READ_ONLY,
    names=names.topics_in_query,
    placement=Paged("", lambda one: one.topic, newest_first=False),
    id="topicCounts",
    summary="Item counts and options of topics",
    query=CountsQuery,
    returns={200: list[TopicCounts]},
    errors=DATABASE,
)
async def counts(shard: Shard, call: Call[CountsQuery, None]) -> list[TopicCounts]:
    query = call.query
    return await shard.broker.topics.admin.counts(
        query.namespace, query.topic or None, query.search, query.limit, query.offset or 0
    )


@routes.on_shard(
    "GET",
    f"{_NATIVE}/priorities",
    access=Access.READ_ONLY,
    names=names.topics_in_query,
    placement=by_topic(),
    id="topicPriorities",
    summary="Item counts of a topic by priority",
    description="The priority that is served first comes first.",
    query=PrioritiesQuery,
    returns={200: list[PriorityCounts]},
    errors=DATABASE,
)
async def priorities(shard: Shard, call: Call[PrioritiesQuery, None]) -> list[PriorityCounts]:
    return await shard.broker.topics.admin.priorities(_key(call.query), call.query.limit)


@routes.on_shard(
    "POST",
    f"{_NATIVE}/configure",
    access=Access.ADMIN,
    names=names.topic(decode_configure),
    placement=by_topic(),
    id="configureTopic",
    summary="Set options of a topic",
    description="Options that are not sent stay as they are; null stands for the default. A topic that does not exist "
    "is created.",
    body=ConfigureBody,
    decode=decode_configure,
    body_example={"namespace": "payments", "topic": "refunds", "options": {"max_retries": 5, "ttl_seconds": 3600}},
    returns={200: ConfiguredTopic},
    errors=DATABASE,
)
async def configure(shard: Shard, call: Call[None, ConfigureBody]) -> ConfiguredTopic:
    return await shard.broker.topics.admin.configure((call.body.namespace, call.body.topic), call.body.options)


@routes.on_shard(
    "POST",
    f"{_NATIVE}/pause",
    access=Access.ADMIN,
    names=names.topic(decode_topic),
    placement=by_topic(),
    id="pauseTopic",
    summary="Pause a topic",
    description="Items are enqueued as before; dequeues get none of its items, and wait. Leases stay.",
    body=TopicName,
    decode=decode_topic,
    returns={200: PausedTopic},
    errors=FOUND,
)
async def pause(shard: Shard, call: Call[None, TopicName]) -> PausedTopic:
    key = (call.body.namespace, call.body.topic)
    return PausedTopic(*key, True, await shard.broker.topics.admin.pause(key, True))


@routes.on_shard(
    "POST",
    f"{_NATIVE}/resume",
    access=Access.ADMIN,
    names=names.topic(decode_topic),
    placement=by_topic(),
    id="resumeTopic",
    summary="Resume a topic",
    description="Waiting dequeues are served at once.",
    body=TopicName,
    decode=decode_topic,
    returns={200: PausedTopic},
    errors=FOUND,
)
async def resume(shard: Shard, call: Call[None, TopicName]) -> PausedTopic:
    key = (call.body.namespace, call.body.topic)
    return PausedTopic(*key, False, await shard.broker.topics.admin.pause(key, False))


@routes.on_shard(
    "POST",
    f"{_NATIVE}/purge",
    access=Access.ADMIN,
    names=names.topic(decode_purge),
    placement=by_topic(),
    id="purgeTopic",
    summary="Remove all items of a topic",
    description="Leased ones too, unless `leased` is false; dead letters and options stay.",
    body=PurgeBody,
    decode=decode_purge,
    returns={200: PurgedTopic},
    errors=DATABASE,
)
async def purge(shard: Shard, call: Call[None, PurgeBody]) -> PurgedTopic:
    key = (call.body.namespace, call.body.topic)
    return PurgedTopic(*key, await shard.broker.topics.purge(key, leased=call.body.leased))


@routes.on_shard(
    "DELETE",
    _NATIVE,
    access=Access.ADMIN,
    names=names.topics_in_query,
    placement=by_topic(),
    id="deleteTopic",
    summary="Delete a topic and everything in it",
    query=TopicQuery,
    returns={200: DeletedTopic},
    errors=DATABASE,
)
async def delete(shard: Shard, call: Call[TopicQuery, None]) -> DeletedTopic:
    key = _key(call.query)
    return DeletedTopic(*key, await shard.broker.topics.delete(key))


async def _place_quotas(shards: Any, invoke: Invoke, call: Call[None, None]) -> dict[str, int]:
    """As the home shard of each namespace has it."""
    answers: Sequence[Mapping[str, int]] = await shards.on_every_shard(lambda shard: invoke(shard, call))
    names = sorted({name for answer in answers for name in answer})
    homes = {name: await shards.directory.find(Name.namespace(name)) for name in names}
    return {name: answers[homes[name]][name] for name in names if name in answers[homes[name]]}


@routes.on_shard(
    "GET",
    f"{_NATIVE}/quotas",
    access=Access.ADMIN,
    placement=Custom(_place_quotas),
    summary="Quotas by namespace, in items per minute",
    returns={200: dict[str, int]},
    errors=DATABASE,
)
async def quotas(shard: Shard, call: Call[None, None]) -> dict[str, int]:
    await shard.broker.topics.quotas.refresh()
    return dict(shard.broker.topics.quotas.all())


@routes.on_shard(
    "PUT",
    f"{_NATIVE}/quotas",
    access=Access.ADMIN,
    names=names.topics_of_namespace(decode_quota),
    placement=by_namespace(),
    summary="Set the quota of a namespace",
    description="It overrides NAMESPACE_QUOTAS; null removes the override.",
    body=QuotaBody,
    decode=decode_quota,
    body_example={"namespace": "payments", "per_minute": 5000},
    returns={200: Quota},
    errors=DATABASE,
)
async def set_quota(shard: Shard, call: Call[None, QuotaBody]) -> Quota:
    namespace, topics = call.body.namespace, shard.broker.topics
    await topics.set_quota(namespace, call.body.per_minute)
    return Quota(namespace, await topics.quotas.limit(namespace))


def _merge_modes(answers: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Every shard has the same ones; one that was unavailable may lack some."""
    return dict(sorted({namespace: mode for one in reversed(answers) for namespace, mode in one.items()}.items()))


@routes.on_shard(
    "GET",
    f"{_NATIVE}/modes",
    access=Access.ADMIN,
    placement=Everywhere(_merge_modes),
    id="writeModes",
    summary="Write modes by namespace",
    description="Namespaces that are not listed are `sync`.",
    returns={200: dict[str, WriteMode]},
    errors=DATABASE,
)
async def modes(shard: Shard, call: Call[None, None]) -> dict[str, str]:
    await shard.broker.topics.modes.refresh()
    return shard.broker.topics.modes.all()


@routes.on_shard(
    "PUT",
    f"{_NATIVE}/modes",
    access=Access.ADMIN,
    names=names.topics_of_namespace(decode_mode),
    placement=Everywhere(first_answer, required=True),
    id="setWriteMode",
    summary="Set the write mode of a namespace",
    description="`sync`: items are in PostgreSQL before they are answered. `buffered`: they are in a log on disk, and "
    "soon in PostgreSQL. It overrides NAMESPACE_MODES; null removes the override.",
    body=ModeBody,
    decode=decode_mode,
    body_example={"namespace": "payments", "mode": "buffered"},
    returns={200: Mode},
    errors=DATABASE,
)
async def set_mode(shard: Shard, call: Call[None, ModeBody]) -> Mode:
    namespace, topics = call.body.namespace, shard.broker.topics
    await topics.set_mode(namespace, call.body.mode)
    return Mode(namespace, "buffered" if topics.modes.of(namespace) == BUFFERED else "sync")


def _key(query: TopicQuery) -> TopicKey:
    return query.namespace, query.topic


def _found(refs: Sequence[ItemRef], outcomes: Sequence[object]) -> list[ItemRef]:
    """The items that there were: names that were made up are no metrics."""
    return [ref for ref, outcome in zip(refs, outcomes, strict=True) if outcome is not None]


def _took(api: Api, operation: str, named: Sequence[EnqueueItem | ItemRef], began: float) -> None:
    api.broker.meter.topic_request(operation, {(one.namespace, one.topic) for one in named}, clock() - began)


def _dequeue_options(api: Api, query: DequeueQuery | DequeueManyQuery) -> tuple[int, float | None, float]:
    """How many, the seconds of the lease, and the seconds to wait."""
    timeout = api.settings.default_timeout if query.timeout is None else query.timeout
    return query.limit, query.lease, min(timeout, api.settings.max_wait_ms) / 1000 if query.wait else 0.0


def _ids_as_text(request: Request) -> bool:
    return request.query.get("ids") == "string" or request.headers.get(b"x-queen-ids") == b"string"


def _nacked(outcome: Nacked) -> dict[str, Any]:
    return {"dlq": outcome.dead, "retry_in_seconds": round(outcome.seconds, 3)}


def _settled(
    request: Request,
    refs: Sequence[ItemRef],
    several: bool,
    outcomes: Sequence[Any],
    missing: str,
    describe: Callable[[Any], dict[str, Any]] | None = None,
) -> Response:
    """An array is answered with the outcome of each. At a short path, one item is answered with `OK` or 404."""
    if not several and not request.path.startswith(_NATIVE):
        if outcomes[0] is None:
            raise NotFound(f"{missing}: {refs[0].id} in {refs[0].namespace}/{refs[0].topic}")
        return _OK
    as_text = _ids_as_text(request)
    answers: list[dict[str, Any]] = []
    for ref, outcome in zip(refs, outcomes, strict=True):
        failed = missing if outcome is None else str(outcome) if isinstance(outcome, QueenError) else None
        number = ref.number
        answer = {"id": str(number) if as_text else number, "success": failed is None, "error": failed}
        answers.append(answer if failed is not None or describe is None else answer | describe(outcome))
    return Response(200, msgspec.json.encode(answers))
