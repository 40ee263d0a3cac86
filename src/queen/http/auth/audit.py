"""The audit log: changes by administrators, with the actor, its address, the previous state and the request."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import asyncpg
import msgspec

from queen.broker.broker import Broker
from queen.errors import QueenError
from queen.http.auth.resources import is_about_topics
from queen.http.server.errors import status_for
from queen.http.server.message import Access, Handler, Request, Response, Route
from queen.wire.ids import parse_partition_uuid

_MOST_BODY: Final = 8192
# Of a longer one lists and texts are cut, and what is cut says so.
_MOST_SHORTENED: Final = 65_536
_MOST_ENTRIES: Final = 20
_MOST_TEXT: Final = 200
# Deeper than anything that is declared: readers of the log need not decode more.
_DEEPEST: Final = 50
_CUT: Final = "..."
_MOST_ROWS: Final = 100
_HIDDEN: Final = "***"
_SECRET_NAME: Final = re.compile("password|secret", re.IGNORECASE)
# What a pipeline writes to may have a password in its address.
_PASSWORD_IN_URL: Final = re.compile(r"(://[^\s/:@]*:)[^\s/@]+@")
# Hosts of one cluster talk to each other all the time.
_NEVER: Final = ("/internal/api/",)

log = logging.getLogger(__name__)


def is_audited(route: Route) -> bool:
    """Whether calls of a route are recorded: those that change something."""
    if route.method == "GET" or route.pattern.startswith(_NEVER):
        return False
    return route.access is Access.ADMIN or (route.declaration is not None and route.declaration.audited)


class Audit:
    """Notes every request to an audited route that changed something, or failed half-way."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._brokers = brokers

    def around(self, route: Route, handler: Handler, sent: Mapping[str, Any] | None = None) -> Handler:
        """The handler of an audited route, with a note of each call. `sent` stands for bodies that are no JSON."""
        action = f"{route.method} {route.pattern}"
        may_count = _has_dry_run(route)

        async def audited(request: Request) -> Response:
            body = request.body if sent is None else msgspec.json.encode(sent)
            if may_count and _only_counts(body):
                result = handler(request)
                return await result if inspect.isawaitable(result) else result
            before = await self._before(request, body)
            try:
                result = handler(request)
                response = await result if inspect.isawaitable(result) else result
            except Exception as error:
                # Errors of SQS have statuses of their own.
                await self._note(request, action, getattr(error, "status", None) or status_for(error), before, body)
                raise
            # What was sent says what there is now; where nothing was sent, the answer does.
            await self._note(request, action, response.status, before, body or response.body)
            return response

        return audited

    async def _before(self, request: Request, body: bytes) -> Any:
        """The state before the change: modes, a group, a topic, a quota, a declaration, the options of a queue."""
        params, sent = request.params, _named_in(body)
        # What a client calls a path may be spelled in many ways.
        path = request.route.pattern if request.route is not None else request.path
        if path.startswith("/api/v1/system/maintenance"):
            modes = self._brokers[0].modes
            return {"push": modes.push_maintenance, "pop": modes.pop_maintenance}
        try:
            if "group" in params:
                return await self._group(path, params["group"], params.get("queue"))
            if request.route is not None and is_about_topics(request.route):
                return await self._topic(request, path)
            if path.startswith("/api/v1/pipeline-declarations"):
                return await self._row("audit_pipeline", params.get("pipeline") or sent.name)
            if path.startswith("/api/v1/ephemeral"):
                return await self._row("audit_ephemeral", params.get("queue") or sent.queue)
            if path.startswith("/api/v1/shards"):
                return await self._shard(sent)
            if "stream" in params:
                return await self._row("audit_stream", params["stream"])
            if "partition" in params:
                return await self._place(params["partition"])
            if sent.sqs_queue is not None:
                return await self._row("audit_sqs_queue", sent.sqs_queue)
            return await self._queue(params.get("queue") or request.query.get("queue") or sent.queue)
        except (QueenError, asyncpg.PostgresError):
            # The handler reports what is wrong.
            return None

    async def _row(self, statement: str, name: str | None) -> Any:
        """What a statement finds under a name, on whichever shard."""
        for broker in self._brokers:
            for row in await broker.database.fetch(statement, name):
                return msgspec.json.decode(row["found"])
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
        partition = parse_partition_uuid(partition_id)
        if partition is None:
            return None
        for broker in self._brokers:
            for found in (await broker.catalog.partitions_by_id([partition])).values():
                return {"queue": found.queue_name, "partition": found.name}
        return None

    async def _shard(self, sent: _Named) -> Any:
        """Where a queue or a topic is."""
        for number, broker in enumerate(self._brokers):
            if (sent.queue and await broker.catalog.queue(sent.queue)) or (
                sent.namespace and sent.topic and await broker.topics.admin.counts(sent.namespace, sent.topic)
            ):
                return {"shard": number}
        return None

    async def _group(self, path: str, group: str, queue: str | None) -> Any:
        """Where a group is; whether it is paused, or since when it is subscribed, where that is what changes."""
        if path.endswith(("/pause", "/resume")):
            found = await self._queue(queue)
            return {"paused": group in found["paused_groups"]} if found is not None else None
        if path.endswith("/subscription"):
            return await self._some("subscriptions", "audit_subscriptions", group)
        return await self._some("positions", "audit_positions", group, queue)

    async def _some(self, name: str, statement: str, *arguments: str | None) -> Any:
        """Some of the rows that a statement finds, on all shards."""
        rows = [
            dict(row)
            for broker in self._brokers
            for row in await broker.database.fetch(statement, *arguments, _MOST_ROWS)
        ]
        return {name: rows[:_MOST_ROWS]} if rows else None

    async def _topic(self, request: Request, path: str) -> Any:
        """The counts and options of a topic, or the quota or write mode of a namespace."""
        sent = _named_in(request.body)
        namespace = request.query.get("namespace") or sent.namespace or ""
        if path.endswith("/quotas"):
            return {"per_minute": await self._brokers[0].topics.quotas.limit(namespace)}
        if path.endswith("/modes"):
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
        # Text that is no JSON is left out rather than cut to something else.
        after = _without_passwords(body) if body else None
        try:
            await self._brokers[0].database.fetch(
                "audit_write",
                request.subject,
                request.peer,
                action,
                request.path,
                status,
                msgspec.json.encode(_redacted(before)).decode() if before is not None else None,
                after.replace("\\u0000", "\\ufffd") if after is not None else None,
            )
        except (QueenError, asyncpg.PostgresError) as error:
            log.error(
                "%s %s by %s from %s was answered %d, but is missing in the audit log: %s",
                request.method,
                request.path,
                request.subject or "a client without a token",
                request.peer,
                status,
                error,
            )


class _Named(msgspec.Struct):
    queue: str | None = None
    namespace: str | None = None
    topic: str | None = None
    name: str | None = None
    queue_name: str | None = msgspec.field(default=None, name="QueueName")
    queue_url: str | None = msgspec.field(default=None, name="QueueUrl")

    @property
    def sqs_queue(self) -> str | None:
        """The queue that a request of SQS names."""
        return self.queue_name or (self.queue_url.rpartition("/")[2] if self.queue_url else None)


def _named_in(body: bytes) -> _Named:
    """What a body names; of a list, its first entry."""
    try:
        found = msgspec.json.decode(body, type=_Named | list[_Named]) if body else _Named()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Named()
    if isinstance(found, _Named):
        return found
    return found[0] if found else _Named()


class _Counted(msgspec.Struct):
    dry_run: bool = msgspec.field(default=False, name="dryRun")


def _has_dry_run(route: Route) -> bool:
    """Whether a route can be asked only to count what it would change."""
    return route.declaration is not None and "dry_run" in getattr(route.declaration.body, "__struct_fields__", ())


def _only_counts(body: bytes) -> bool:
    try:
        return msgspec.json.decode(body, type=_Counted).dry_run
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _without_passwords(body: bytes) -> str | None:
    """JSON as it came, but for passwords and for what is cut of long ones; None when it is no JSON."""
    try:
        sent = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    shown = _redacted(sent)
    if len(body) > _MOST_BODY:
        # Blanks are no way to have a change noted without what it was.
        short = msgspec.json.encode(_shortened(shown))
        return short.decode() if len(short) <= _MOST_SHORTENED else None
    return body.decode(errors="replace") if shown == sent else msgspec.json.encode(shown).decode()


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(one) for key, one in value.items()}
    if isinstance(value, str):
        return value if len(value) <= _MOST_TEXT else f"{value[:_MOST_TEXT]}{_CUT} ({len(value)} characters)"
    if not isinstance(value, list):
        return value
    kept = [_shortened(one) for one in value[:_MOST_ENTRIES]]
    return kept if len(value) <= _MOST_ENTRIES else [*kept, f"{_CUT} ({len(value)} entries)"]


def _redacted(value: Any, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        return _CUT
    if isinstance(value, dict):
        return {
            key: _HIDDEN if _SECRET_NAME.search(str(key)) else _redacted(one, depth + 1) for key, one in value.items()
        }
    if isinstance(value, str):
        return _PASSWORD_IN_URL.sub(rf"\1{_HIDDEN}@", value)
    return [_redacted(one, depth + 1) for one in value] if isinstance(value, list) else value
