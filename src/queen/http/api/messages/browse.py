"""Single messages: list, show, delete, retry, dead-letter."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from queen.broker.inspect.browse import MessageFilter
from queen.errors import BadRequest, NotFound
from queen.http.routing.call import Call
from queen.http.routing.context import Shard
from queen.http.routing.placement import Paged, by_partition
from queen.http.routing.route import DATABASE, SEALED, RouteTable
from queen.http.server.message import Access
from queen.log.catalog import QUEUE_MODE
from queen.storage.database import can_be_stored
from queen.wire.api.messages.browse import (
    DeadLetterQuery,
    DeadLetterRequest,
    MessageDeadLettered,
    MessageDeleted,
    MessageList,
    MessageRetried,
    MessagesQuery,
    MessageView,
)
from queen.wire.push import LONGEST_NAME

routes = RouteTable("Messages")

_MESSAGE = "/api/v1/messages/{partition}/{transaction}"
_BY_OPERATOR = "Moved to DLQ by operator"


@routes.on_shard(
    "GET",
    "/api/v1/messages",
    access=Access.READ_ONLY,
    placement=Paged("messages", lambda message: message.created_at),
    summary="List messages",
    description="Newest first, without payloads; of the last hour unless `from` is sent.",
    query=MessagesQuery,
    returns={200: MessageList},
    errors=DATABASE,
)
async def messages(shard: Shard, call: Call[MessagesQuery, None]) -> MessageList:
    query = call.query
    wanted = MessageFilter(
        queue=query.queue or None,
        partition=query.partition or None,
        namespace=query.ns or None,
        task=query.task or None,
        status=query.status,
        since=query.since,
        before=_end_of_minute(query.until),
    )
    return await shard.broker.message_browser.page(wanted, query.limit, query.offset)


@routes.on_shard(
    "GET",
    _MESSAGE,
    access=Access.READ_ONLY,
    placement=by_partition(),
    summary="A message with its payload",
    returns={200: MessageView},
    errors=(404, 409, 503),
)
async def message(shard: Shard, call: Call[None, None]) -> MessageView:
    return await shard.broker.message_browser.get(*_named(call))


@routes.on_shard(
    "DELETE",
    _MESSAGE,
    access=Access.READ_WRITE,
    placement=by_partition(),
    summary="Delete a message, its dead letters and its traces",
    description="A consumer that has leased it keeps what was delivered.",
    returns={200: MessageDeleted},
    errors=SEALED,
)
async def delete_message(shard: Shard, call: Call[None, None]) -> MessageDeleted:
    partition, transaction = _named(call)
    try:
        return await shard.broker.messages.delete(partition, transaction)
    except NotFound as error:
        # Deleting what is not there is not an error to the clients that were written for this route.
        return MessageDeleted(success=False, partition_id=partition, transaction_id=transaction, message=str(error))


@routes.on_shard(
    "POST",
    f"{_MESSAGE}/retry",
    access=Access.READ_WRITE,
    placement=by_partition(),
    summary="Store a copy at the end of its partition",
    description="The copy is for every group, and the message's dead letters are removed.",
    returns={200: MessageRetried},
    errors=(404, 409, 503),
)
async def retry_message(shard: Shard, call: Call[None, None]) -> MessageRetried:
    return await shard.broker.messages.retry(*_named(call))


@routes.on_shard(
    "POST",
    f"{_MESSAGE}/dlq",
    access=Access.READ_WRITE,
    placement=by_partition(),
    id="giveUpMessage",
    summary="Dead-letter a message",
    description="Nothing else changes: if it is pending it is still delivered.",
    query=DeadLetterQuery,
    body=DeadLetterRequest,
    body_required=False,
    returns={200: MessageDeadLettered},
    errors=(404, 409, 503),
)
async def dead_letter_message(
    shard: Shard, call: Call[DeadLetterQuery, DeadLetterRequest | None]
) -> MessageDeadLettered:
    sent = call.body or DeadLetterRequest()
    group = call.query.consumer_group or sent.consumer_group or QUEUE_MODE
    if len(group) > LONGEST_NAME or not can_be_stored(group):
        raise BadRequest(f"consumerGroup must be at most {LONGEST_NAME} characters, none of them NUL")
    return await shard.broker.messages.dead_letter(*_named(call), group, sent.error or _BY_OPERATOR)


def _named(call: Call[Any, Any]) -> tuple[str, str]:
    return call.params["partition"], call.params["transaction"]


def _end_of_minute(moment: datetime | None) -> datetime | None:
    """The list's clock has minutes: a time on it includes all of its minute."""
    if moment is None:
        return None
    try:
        return moment.replace(second=0, microsecond=0) + timedelta(minutes=1)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)
