"""Topics: enqueue, dequeue, ack, nack, extend, dead letters, and looking after them.

Every route has its place under `/api/v1/topics`; short paths at the root are the same handlers, for clients of mqueue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from queen.broker.broker import Broker
from queen.broker.topics.catalog import TopicKey
from queen.broker.topics.settle import NOT_LEASED, Nacked
from queen.errors import BadRequest, NotFound
from queen.http.api.params import query_name, read_page
from queen.http.server.message import Request, Response, json_response
from queen.http.server.router import Access, Router
from queen.metrics.meter import clock
from queen.wire.topic_items import render_dead_letters, render_ids, render_items, render_mixed_items
from queen.wire.topics import (
    LONGEST_LEASE,
    EnqueueItem,
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

_BY_DEFAULT: Final = 10
_MOST_DEQUEUED: Final = 10_000
_NOT_DEAD: Final = "Dead letter not found"
_NATIVE: Final = "/api/v1/topics"
_OK: Final = Response(200, b"OK", b"text/plain; charset=utf-8")


class TopicRoutes:
    """The routes of topics."""

    def __init__(self, broker: Broker) -> None:
        self._settings = broker.settings
        self._topics = broker.topics
        self._meter = broker.meter

    def add_to(self, router: Router) -> None:
        read, write = Access.READ_ONLY, Access.READ_WRITE
        for prefix in (_NATIVE, ""):
            router.add("POST", f"{prefix}/enqueue", self.enqueue, write)
            router.add("GET", f"{prefix}/dequeue", self.dequeue, read)
            router.add("POST", f"{prefix}/ack", self.ack, write)
            router.add("POST", f"{prefix}/nack", self.nack, write)
            router.add("GET", prefix or "/topics", self.active, read)
            router.add("GET", f"{prefix}/dlq", self.list_dead, read)
            router.add("POST", f"{prefix}/dlq/delete", self.delete_dead, write)
            router.add("POST", f"{prefix}/dlq/retry", self.retry_dead, write)
        router.add("GET", f"{_NATIVE}/dequeue/many", self.dequeue_many, read)
        router.add("POST", f"{_NATIVE}/extend", self.extend, write)
        router.add("POST", f"{_NATIVE}/release", self.release, write)
        router.add("GET", f"{_NATIVE}/peek", self.peek, read)
        router.add("GET", f"{_NATIVE}/counts", self.counts, read)
        router.add("POST", f"{_NATIVE}/configure", self.configure, Access.ADMIN)
        router.add("POST", f"{_NATIVE}/purge", self.purge, Access.ADMIN)
        router.add("DELETE", _NATIVE, self.delete, Access.ADMIN)
        router.add("GET", f"{_NATIVE}/quotas", self.quotas, Access.ADMIN)
        router.add("PUT", f"{_NATIVE}/quotas", self.set_quota, Access.ADMIN)
        router.add("GET", f"{_NATIVE}/modes", self.modes, Access.ADMIN)
        router.add("PUT", f"{_NATIVE}/modes", self.set_mode, Access.ADMIN)

    async def enqueue(self, request: Request) -> Response:
        """Body: an item or an array of them; answers an array of ids."""
        began = clock()
        items = decode_enqueue(request.body)
        ids = await self._topics.writer.enqueue(items)
        self._took("enqueue", items, began)
        return Response(200, render_ids(ids, _ids_as_text(request)))

    async def dequeue(self, request: Request) -> Response:
        """Query: `namespace`, `topic`, `limit`, `wait`, `timeout` (ms) and `lease` (s); answers an array of items."""
        key = _topic(request)
        asked = self._topics.dequeuer.dequeue(key, *self._dequeue_options(request))
        request.on_disconnect(asked.cancel)
        return Response(200, render_items(await asked, *key, _ids_as_text(request)))

    async def dequeue_many(self, request: Request) -> Response:
        """The same for several topics as if they were one: `topics`, a JSON array of names, or all of a namespace."""
        namespace = _required(request, "namespace")
        names = decode_names(request.query.get("topics", ""), "topics")
        asked = self._topics.many.dequeue(namespace, names, *self._dequeue_options(request))
        request.on_disconnect(asked.answer.cancel)
        rows = await asked.answer
        return Response(200, render_mixed_items(rows, namespace, asked.topics, _ids_as_text(request)))

    async def ack(self, request: Request) -> Response:
        """Body: `{id, namespace, topic}` and perhaps `lease_owner`, or an array of them."""
        began = clock()
        refs, several = decode_acks(request.body)
        done = await self._topics.settler.ack(refs)
        self._took("ack", refs, began)
        return _settled(request, refs, several, done, NOT_LEASED)

    async def nack(self, request: Request) -> Response:
        """Like ack, with an `error`."""
        began = clock()
        refs, several = decode_nacks(request.body)
        outcomes = await self._topics.settler.nack(refs)
        self._took("nack", refs, began)
        return _settled(request, refs, several, outcomes, NOT_LEASED, _nacked)

    async def extend(self, request: Request) -> Response:
        """Like ack, with `seconds` from now; without, what the topic is set to."""
        refs, several = decode_extends(request.body)
        ends = await self._topics.settler.extend(refs)
        return _settled(request, refs, several, ends, NOT_LEASED, lambda end: {"lease_expires_at": end})

    async def release(self, request: Request) -> Response:
        """Like ack; the items are ready again at once."""
        refs, several = decode_acks(request.body)
        return _settled(request, refs, several, await self._topics.settler.release(refs), NOT_LEASED)

    async def active(self, request: Request) -> Response:
        return json_response(200, await self._topics.admin.active(_required(request, "namespace")))

    async def list_dead(self, request: Request) -> Response:
        key = _topic(request)
        rows = await self._topics.dead_letters.page(key, *read_page(request, _BY_DEFAULT))
        return Response(200, render_dead_letters(rows, *key, _ids_as_text(request)))

    async def delete_dead(self, request: Request) -> Response:
        refs, several = decode_acks(request.body)
        return _settled(request, refs, several, await self._topics.dead_letters.delete(refs), _NOT_DEAD)

    async def retry_dead(self, request: Request) -> Response:
        refs, several = decode_acks(request.body)
        return _settled(request, refs, several, await self._topics.dead_letters.retry(refs), _NOT_DEAD)

    async def peek(self, request: Request) -> Response:
        """Query: `namespace`, `topic`, `limit`, and `delayed` for items that are not due yet as well."""
        key = _topic(request)
        limit, _ = read_page(request, _BY_DEFAULT)
        rows = await self._topics.admin.peek(key, limit, delayed=request.query_bool("delayed", False))
        return Response(200, render_items(rows, *key, _ids_as_text(request)))

    async def counts(self, request: Request) -> Response:
        namespace, topic = _required(request, "namespace"), query_name(request, "topic")
        return json_response(200, await self._topics.admin.counts(namespace, topic or None))

    async def configure(self, request: Request) -> Response:
        """Body: `namespace`, `topic`, `options`; options that are not sent stay as they are."""
        sent = decode_configure(request.body)
        answer = await self._topics.admin.configure((sent.namespace, sent.topic), sent.options)
        return json_response(200, answer)

    async def purge(self, request: Request) -> Response:
        name = decode_topic(request.body)
        removed = await self._topics.purge((name.namespace, name.topic))
        return json_response(200, {"namespace": name.namespace, "topic": name.topic, "removed": removed})

    async def delete(self, request: Request) -> Response:
        key = _topic(request)
        return json_response(200, {"namespace": key[0], "topic": key[1], "deleted": await self._topics.delete(key)})

    def _took(self, asked: str, named: Sequence[EnqueueItem | ItemRef], began: float) -> None:
        self._meter.topic_request(asked, {(one.namespace, one.topic) for one in named}, clock() - began)

    def _dequeue_options(self, request: Request) -> tuple[int, float | None, float]:
        """How many, the seconds of the lease, and the seconds to wait."""
        limit = min(_MOST_DEQUEUED, max(1, request.query_int("limit", _BY_DEFAULT)))
        timeout = max(0, request.query_int("timeout", self._settings.default_timeout)) / 1000
        return limit, _lease(request), timeout if request.query_bool("wait", False) else 0.0

    async def quotas(self, request: Request) -> Response:
        await self._topics.quotas.refresh()
        return json_response(200, self._topics.quotas.all())

    async def set_quota(self, request: Request) -> Response:
        """Body: `namespace`, `per_minute`; null lets NAMESPACE_QUOTAS decide."""
        sent = decode_quota(request.body)
        await self._topics.set_quota(sent.namespace, sent.per_minute)
        return json_response(
            200, {"namespace": sent.namespace, "per_minute": self._topics.quotas.limit(sent.namespace)}
        )

    async def modes(self, request: Request) -> Response:
        await self._topics.modes.refresh()
        return json_response(200, self._topics.modes.all())

    async def set_mode(self, request: Request) -> Response:
        """Body: `namespace`, `mode`; null lets NAMESPACE_MODES decide."""
        sent = decode_mode(request.body)
        await self._topics.set_mode(sent.namespace, sent.mode)
        return json_response(200, {"namespace": sent.namespace, "mode": self._topics.modes.of(sent.namespace)})


def _topic(request: Request) -> TopicKey:
    return _required(request, "namespace"), _required(request, "topic")


def _required(request: Request, key: str) -> str:
    name = query_name(request, key)
    if not name:
        raise BadRequest(f"{key} is required (in the query)")
    return name


def _lease(request: Request) -> float | None:
    """`lease` in seconds; None when it is absent, so that the topic's own counts."""
    text = request.query.get("lease", "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_LEASE:
        raise BadRequest(f"lease must be a number of seconds above 0 and at most {LONGEST_LEASE}, not {text[:80]!r}")
    return seconds


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
    describe: Callable[[Any], dict[str, Any]] = lambda outcome: {},
) -> Response:
    """An array is answered with what came of each. At a short path, one item is answered with `OK` or 404."""
    if not several and not request.path.startswith(_NATIVE):
        if outcomes[0] is None:
            raise NotFound(f"{missing}: {refs[0].id} in {refs[0].namespace}/{refs[0].topic}")
        return _OK
    as_text = _ids_as_text(request)
    answers = [
        {"id": str(ref.number) if as_text else ref.number, "success": outcome is not None}
        | ({"error": missing} if outcome is None else {"error": None} | describe(outcome))
        for ref, outcome in zip(refs, outcomes, strict=True)
    ]
    return Response(200, msgspec.json.encode(answers))
