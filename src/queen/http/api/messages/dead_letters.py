"""The dead letter queue: list, retry, purge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from queen.broker.ack.dead_letters import DeadLetterFilter
from queen.errors import BadRequest
from queen.http.auth import names
from queen.http.routing.call import Call
from queen.http.routing.context import Shard
from queen.http.routing.placement import Everywhere, Paged, by_queue
from queen.http.routing.query import read_time
from queen.http.routing.route import DATABASE, FOUND, RouteTable
from queen.http.server.message import Access
from queen.wire.api.messages.dead_letters import (
    DeadLetterList,
    DeadLetterReport,
    DeadLetterReportQuery,
    DeadLettersQuery,
    Purged,
    PurgeQuery,
    Retried,
    Retry,
)
from queen.wire.decode import decode_fields

routes = RouteTable("Dead letters")

_RETRIED_BY_DEFAULT = 1000
_MOST_RETRIED = 10_000
_MOST_IDS = 10_000


@routes.on_shard(
    "GET",
    "/api/v1/dlq",
    access=Access.READ_ONLY,
    names=names.by_query("queue", "consumerGroup"),
    placement=Paged("messages", lambda letter: letter.failed_at),
    summary="List dead letters",
    query=DeadLettersQuery,
    returns={200: DeadLetterList},
    errors=DATABASE,
)
async def dead_letters(shard: Shard, call: Call[DeadLettersQuery, None]) -> DeadLetterList:
    query = call.query
    wanted = DeadLetterFilter(
        queue=query.queue or None,
        group=query.consumer_group or None,
        partition=query.partition or None,
        since=query.since,
        until=query.until,
    )
    return await shard.broker.dead_letters.page(wanted, query.limit, query.offset)


def _merge_reports(answers: Sequence[DeadLetterReport]) -> DeadLetterReport:
    reasons = sorted((reason for answer in answers for reason in answer.reasons), key=lambda reason: -reason.count)
    return DeadLetterReport(sum(answer.total for answer in answers), reasons)


@routes.on_shard(
    "GET",
    "/api/v1/dlq/report",
    access=Access.READ_ONLY,
    names=names.by_query("queue", "consumerGroup"),
    placement=Everywhere(_merge_reports, by_queue=True),
    id="deadLetterReport",
    summary="What dead letters died of",
    query=DeadLetterReportQuery,
    returns={200: DeadLetterReport},
    errors=DATABASE,
    cached=True,
)
async def dead_letter_report(shard: Shard, call: Call[DeadLetterReportQuery, None]) -> DeadLetterReport:
    query = call.query
    wanted = DeadLetterFilter(
        queue=query.queue or None,
        group=query.consumer_group or None,
        partition=query.partition or None,
        since=query.since,
        until=query.until,
    )
    return await shard.broker.dead_letters.report(wanted, query.limit)


def decode_retry(body: bytes) -> Retry:
    """Which dead letters are meant. Times and names are checked when they are used."""
    sent = decode_fields(body, Retry)
    queue = _text(sent, "queue")
    if queue is None:
        raise BadRequest("queue is required")
    return Retry(
        queue=queue,
        consumer_group=_text(sent, "consumerGroup"),
        partition=_text(sent, "partition"),
        since=_text(sent, "from"),
        until=_text(sent, "to"),
        transaction_ids=_ids(sent.get("transactionIds")),
        limit=_limit(sent.get("limit")),
    )


@routes.on_shard(
    "POST",
    "/api/v1/dlq/retry",
    access=Access.READ_WRITE,
    names=names.dead_letters,
    audited=True,
    placement=by_queue(),
    summary="Retry dead letters",
    description="Their messages are stored at the ends of their partitions, the earliest failure first, and the dead "
    "letters are removed.",
    body=Retry,
    decode=decode_retry,
    body_example={"queue": "orders", "consumerGroup": "workers", "limit": 100},
    returns={200: Retried},
    errors=(404, 409, 503),
)
async def retry_dead_letters(shard: Shard, call: Call[None, Retry]) -> Retried:
    return await shard.broker.dead_letters.retry(_filter(call.body), call.body.limit or _RETRIED_BY_DEFAULT)


@routes.on_shard(
    "DELETE",
    "/api/v1/dlq",
    access=Access.ADMIN,
    names=names.purged,
    placement=by_queue(),
    summary="Delete dead letters",
    description="Their messages stay in their partitions. The same filters may be sent as a JSON body instead.",
    query=PurgeQuery,
    body=Retry,
    decode=decode_retry,
    body_required=False,
    returns={200: Purged},
    errors=FOUND,
)
async def purge_dead_letters(shard: Shard, call: Call[PurgeQuery, Retry | None]) -> Purged:
    query = call.query
    if call.body is not None:
        return await shard.broker.dead_letters.purge(_filter(call.body))
    if not query.queue:
        raise BadRequest("queue is required")
    wanted = DeadLetterFilter(
        query.queue,
        query.consumer_group or None,
        query.partition or None,
        query.since,
        query.until,
        [query.transaction_ids] if query.transaction_ids else None,
    )
    return await shard.broker.dead_letters.purge(wanted)


def _filter(sent: Retry) -> DeadLetterFilter:
    return DeadLetterFilter(
        sent.queue,
        sent.consumer_group or None,
        sent.partition or None,
        read_time(sent.since, "from") if sent.since else None,
        read_time(sent.until, "to") if sent.until else None,
        sent.transaction_ids,
    )


def _text(sent: Mapping[str, Any], key: str) -> str | None:
    value = sent.get(key)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{key} must be a string")
    return value or None


def _ids(ids: object) -> list[str] | None:
    if ids is None:
        return None
    if isinstance(ids, str):
        ids = [ids]
    if not isinstance(ids, list) or not all(isinstance(id, str) for id in ids):
        raise BadRequest("transactionIds must be an array of strings")
    if len(ids) > _MOST_IDS:
        raise BadRequest(f"transactionIds must be at most {_MOST_IDS}, not {len(ids)}")
    return ids


def _limit(limit: object) -> int | None:
    if limit is None:
        return None
    # To JSON, 5 and 5.0 are the same number.
    if isinstance(limit, float) and limit.is_integer():
        limit = int(limit)
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise BadRequest("limit must be a whole number")
    return min(_MOST_RETRIED, max(1, limit))
