"""The dead letter queue: the list, sending round again, throwing away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from queen.broker.ack.dead_letters import DeadLetterFilter
from queen.broker.broker import Broker
from queen.errors import BadRequest
from queen.http.api.params import read_page, read_time, time_of
from queen.http.server.message import Request, Response, json_response
from queen.http.server.router import Access, Router
from queen.wire.ack import decode_object

_BY_DEFAULT = 100
_RETRIED_BY_DEFAULT = 1000
_MOST_RETRIED = 10_000
_MOST_IDS = 10_000


class DeadLetterRoutes:
    """Looking at dead letters, and what can be done about them."""

    def __init__(self, broker: Broker) -> None:
        self._dead_letters = broker.dead_letters

    def add_to(self, router: Router) -> None:
        router.add("GET", "/api/v1/dlq", self.list, Access.READ_ONLY)
        router.add("POST", "/api/v1/dlq/retry", self.retry, Access.READ_WRITE)
        router.add("DELETE", "/api/v1/dlq", self.purge, Access.ADMIN)

    async def list(self, request: Request) -> Response:
        limit, offset = read_page(request, _BY_DEFAULT)
        query = request.query
        wanted = DeadLetterFilter(
            queue=query.get("queue") or None,
            group=query.get("consumerGroup") or None,
            partition=query.get("partition") or None,
            since=read_time(request, "from"),
            until=read_time(request, "to"),
        )
        return json_response(200, await self._dead_letters.page(wanted, limit, offset))

    async def retry(self, request: Request) -> Response:
        """Body: `queue`, and optionally `consumerGroup`, `partition`, `from`, `to`, `transactionIds`, `limit`."""
        body = decode_object(request.body)
        return json_response(200, await self._dead_letters.retry(_filter(body), _limit(body)))

    async def purge(self, request: Request) -> Response:
        """The same filters, in the query or in a body."""
        given = decode_object(request.body) if request.body else request.query
        return json_response(200, await self._dead_letters.purge(_filter(given)))


def _filter(given: Mapping[str, Any]) -> DeadLetterFilter:
    wanted = DeadLetterFilter(
        queue=_text(given, "queue"),
        group=_text(given, "consumerGroup"),
        partition=_text(given, "partition"),
        since=time_of(_text(given, "from") or "", "from"),
        until=time_of(_text(given, "to") or "", "to"),
        transaction_ids=_ids(given),
    )
    if wanted.queue is None:
        raise BadRequest("queue is required")
    return wanted


def _text(given: Mapping[str, Any], key: str) -> str | None:
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{key} must be a string")
    return value or None


def _ids(given: Mapping[str, Any]) -> list[str] | None:
    ids = given.get("transactionIds")
    if ids is None:
        return None
    if isinstance(ids, str):
        # A query has no arrays; there it names one.
        ids = [ids]
    if not isinstance(ids, list) or not all(isinstance(id, str) for id in ids):
        raise BadRequest("transactionIds must be an array of strings")
    if len(ids) > _MOST_IDS:
        raise BadRequest(f"transactionIds must be at most {_MOST_IDS}, not {len(ids)}")
    return ids


def _limit(given: Mapping[str, Any]) -> int:
    limit = given.get("limit")
    if limit is None:
        return _RETRIED_BY_DEFAULT
    # To JSON, 5 and 5.0 are the same number.
    if isinstance(limit, float) and limit.is_integer():
        limit = int(limit)
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise BadRequest("limit must be a whole number")
    return min(_MOST_RETRIED, max(1, limit))
