"""The audit log: what administrators change, who they are, from where, what was before and what they sent."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Sequence
from typing import Any, Final

import asyncpg
import msgspec

from queen.broker.broker import Broker
from queen.errors import QueenError
from queen.http.server.errors import status_for
from queen.http.server.message import Access, Handler, Request, Response, Route
from queen.wire.ids import parse_partition_uuid

_MOST_BODY: Final = 8192
_MOST_POSITIONS: Final = 100
_HIDDEN: Final = "***"
# What changes how others work, although it needs no administrator.
_AUDITED: Final = frozenset(
    {
        "POST /api/v1/configure",
        "POST /api/v1/resources/queues/{queue}/pause",
        "POST /api/v1/resources/queues/{queue}/resume",
        "POST /api/v1/consumer-groups/{group}/queues/{queue}/pause",
        "POST /api/v1/consumer-groups/{group}/queues/{queue}/resume",
        "POST /api/v1/consumer-groups/{group}/subscription",
        "POST /api/v1/consumer-groups/{group}/queues/{queue}/seek",
        "POST /api/v1/consumer-groups/{group}/queues/{queue}/seek/undo",
        "POST /api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/seek",
        "POST /api/v1/consumer-groups/{group}/queues/{queue}/partitions/{partition}/release",
        "DELETE /api/v1/messages/{partition}/{transaction}",
        "POST /api/v1/messages/{partition}/{transaction}/retry",
        "POST /api/v1/messages/{partition}/{transaction}/dlq",
        "POST /api/v1/messages/delete",
        "POST /api/v1/messages/retry",
        "POST /api/v1/messages/dlq",
        "POST /api/v1/dlq/retry",
        "POST /dlq/retry",
        "POST /dlq/delete",
        "POST /api/v1/topics/dlq/retry",
        "POST /api/v1/topics/dlq/delete",
        "POST /api/v1/ephemeral/configure",
        "POST /api/v1/ephemeral/reset",
        "DELETE /api/v1/ephemeral/queue/{queue}",
    }
)
# Hosts of one cluster talk to each other all the time.
_NEVER: Final = ("/internal/api/",)

log = logging.getLogger(__name__)


def is_audited(route: Route) -> bool:
    """Whether calls of a route are recorded: those that change something."""
    if route.method == "GET" or route.pattern.startswith(_NEVER):
        return False
    return route.access is Access.ADMIN or f"{route.method} {route.pattern}" in _AUDITED


class Audit:
    """Notes every request to an audited route that changed something, or failed half-way."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._brokers = brokers

    def around(self, route: Route, handler: Handler) -> Handler:
        """The handler of an audited route, with a note of each call."""
        action = f"{route.method} {route.pattern}"

        async def audited(request: Request) -> Response:
            before, body = await self._before(request), request.body
            try:
                result = handler(request)
                response = await result if inspect.isawaitable(result) else result
            except Exception as error:
                await self._note(request, action, status_for(error), before, body)
                raise
            # What was sent says what there is now; where nothing was sent, the answer does.
            await self._note(request, action, response.status, before, body or response.body)
            return response

        return audited

    async def _before(self, request: Request) -> Any:
        """The state before the change: modes, a group, a topic, a quota, the options of a queue."""
        path, params = request.path, request.params
        if path.startswith("/api/v1/system/maintenance"):
            modes = self._brokers[0].modes
            return {"push": modes.push_maintenance, "pop": modes.pop_maintenance}
        try:
            if "group" in params:
                return await self._positions(params["group"], params.get("queue"))
            if path.startswith("/api/v1/topics"):
                return await self._topic(request)
            if "partition" in params:
                return await self._place(params["partition"])
            return await self._queue(params.get("queue") or request.query.get("queue") or _named_in(request.body).queue)
        except (QueenError, asyncpg.PostgresError):
            # The handler will say what is wrong.
            return None

    async def _queue(self, name: str | None) -> Any:
        if not name:
            return None
        for broker in self._brokers:
            queue = await broker.catalog.queue(name)
            if queue is not None:
                options = dataclasses.asdict(queue)
                return {key: options[key] for key in options if key not in ("id", "public_id", "created_at")}
        return None

    async def _place(self, partition_id: str) -> Any:
        """The queue and the partition of a message."""
        parsed = parse_partition_uuid(partition_id)
        if parsed is None:
            return None
        for broker in self._brokers:
            for found in (await broker.catalog.partitions_by_id([parsed[1]])).values():
                return {"queue": found.queue_name, "partition": found.name}
        return None

    async def _positions(self, group: str, queue: str | None) -> Any:
        """Where a group is, on some of its partitions."""
        rows = [
            dict(row)
            for broker in self._brokers
            for row in await broker.database.fetch("audit_positions", group, queue, _MOST_POSITIONS)
        ]
        return {"positions": rows[:_MOST_POSITIONS]} if rows else None

    async def _topic(self, request: Request) -> Any:
        """The counts and options of a topic, or the quota or write mode of a namespace."""
        sent = _named_in(request.body)
        namespace = request.query.get("namespace") or sent.namespace or ""
        if request.path.endswith("/quotas"):
            return {"per_minute": self._brokers[0].topics.quotas.limit(namespace)}
        if request.path.endswith("/modes"):
            return {"mode": self._brokers[0].topics.modes.of(namespace)}
        topic = request.query.get("topic") or sent.topic
        if not namespace or not topic:
            return None
        for broker in self._brokers:
            for counts in await broker.topics.admin.counts(namespace, topic):
                return msgspec.to_builtins(counts)
        return None

    async def _note(self, request: Request, action: str, status: int, before: Any, body: bytes) -> None:
        if 400 <= status < 500:
            return
        # Text that is no JSON, or too much of it, is left out rather than cut to something else.
        after = _without_passwords(body) if body and len(body) <= _MOST_BODY else None
        try:
            await self._brokers[0].database.fetch(
                "audit_write",
                request.subject,
                request.peer,
                action,
                request.path,
                status,
                msgspec.json.encode(before).decode() if before is not None else None,
                after.replace("\\u0000", "\\ufffd") if after is not None else None,
            )
        except (QueenError, asyncpg.PostgresError) as error:
            log.error(
                "%s %s by %s from %s was answered %d, but could not be noted in the audit log: %s",
                request.method,
                request.path,
                request.subject,
                request.peer,
                status,
                error,
            )


class _Named(msgspec.Struct):
    queue: str | None = None
    namespace: str | None = None
    topic: str | None = None


def _named_in(body: bytes) -> _Named:
    try:
        return msgspec.json.decode(body, type=_Named) if body else _Named()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Named()


def _without_passwords(body: bytes) -> str | None:
    """JSON as it came, but for passwords; None when it is no JSON."""
    try:
        sent = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    shown = _redacted(sent)
    return body.decode(errors="replace") if shown == sent else msgspec.json.encode(shown).decode()


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _HIDDEN if key.lower() == "password" else _redacted(one) for key, one in value.items()}
    return [_redacted(one) for one in value] if isinstance(value, list) else value
