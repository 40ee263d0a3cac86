"""Messages: list, search, show, delete, retry, dead-letter, one or many at once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from queen.broker.inspect.browse import MessageFilter
from queen.broker.inspect.bulk import Selection
from queen.broker.inspect.search import SearchFilter, describe_found
from queen.errors import BadRequest, NotFound
from queen.http.auth import names
from queen.http.routing.call import Call
from queen.http.routing.context import Shard
from queen.http.routing.placement import Paged, by_partition, by_queue
from queen.http.routing.query import read_time
from queen.http.routing.route import DATABASE, FOUND, SEALED, RouteTable
from queen.http.server.message import Access
from queen.log.catalog import QUEUE_MODE
from queen.storage.database import can_be_stored
from queen.wire.api.messages.browse import (
    BulkDeadLetterRequest,
    BulkDone,
    BulkFilter,
    BulkRequest,
    DeadLetterQuery,
    DeadLetterRequest,
    MessageDeadLettered,
    MessageDeleted,
    MessageList,
    MessageRetried,
    MessagesQuery,
    MessageView,
    SearchQuery,
    SearchResult,
)
from queen.wire.conditions import PayloadFilter, decode_conditions, parse_conditions
from queen.wire.push import LONGEST_NAME, check_name

routes = RouteTable("Messages")

_MESSAGE = "/api/v1/messages/{partition}/{transaction}"
_BY_OPERATOR = "Moved to DLQ by operator"
_BULK_EXAMPLE = {"queue": "orders", "filter": {"status": "dead_letter", "where": ["customer.id=42"]}, "limit": 100}


@routes.on_shard(
    "GET",
    "/api/v1/messages",
    access=Access.READ_ONLY,
    names=names.by_query("queue", "ns"),
    of_groups=False,
    placement=Paged("messages", lambda message: message.created_at),
    summary="List messages",
    description="Newest first, with the beginning of payloads if a `preview` is requested; of the last hour unless "
    "`from` is sent.",
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
        count=query.count,
    )
    return await shard.broker.message_browser.page(wanted, query.limit, query.offset, query.preview)


@routes.on_shard(
    "GET",
    "/api/v1/messages/search",
    access=Access.READ_ONLY,
    names=names.by_query("queue"),
    of_groups=False,
    placement=by_queue(),
    summary="Search the messages of a queue",
    description="With their payloads; partitions by name, each from its newest message back. A call examines a bounded "
    "number of messages and answers with a `cursor` for the next, until there are no more.",
    query=SearchQuery,
    returns={200: SearchResult},
    errors=FOUND,
)
async def search_messages(shard: Shard, call: Call[SearchQuery, None]) -> SearchResult:
    query = call.query
    wanted = SearchFilter(
        query.queue,
        query.partition or None,
        query.since,
        query.until,
        query.status,
        PayloadFilter.of(query.text, decode_conditions(query.where)),
    )
    searched = await shard.broker.message_search.search(wanted, query.limit, query.cursor)
    return SearchResult(
        [describe_found(found, searched.queue) for found in searched.found], searched.scanned, searched.cursor
    )


@routes.on_shard(
    "POST",
    "/api/v1/messages/delete",
    access=Access.READ_WRITE,
    names=names.queue_in_body,
    of_groups=False,
    audited=True,
    placement=by_queue(),
    id="deleteMessages",
    summary="Delete messages, their dead letters and their traces",
    description="Those that are named, or those that pass a filter: then up to `limit`, and the `cursor` says where to "
    "go on. Consumers keep what they have leased.",
    body=BulkRequest,
    body_example=_BULK_EXAMPLE,
    returns={200: BulkDone},
    errors=FOUND,
)
async def delete_messages(shard: Shard, call: Call[None, BulkRequest]) -> BulkDone:
    bulk, selection = shard.broker.bulk_messages, _selection(call.body)
    return await (bulk.count(selection) if call.body.dry_run else bulk.delete(selection))


@routes.on_shard(
    "POST",
    "/api/v1/messages/retry",
    access=Access.READ_WRITE,
    names=names.queue_in_body,
    audited=True,
    placement=by_queue(),
    id="retryMessages",
    summary="Store copies at the ends of their partitions",
    description="The copies are for every group, and the dead letters of the messages are removed. Messages are named "
    "as in a deletion.",
    body=BulkRequest,
    body_example=_BULK_EXAMPLE,
    returns={200: BulkDone},
    errors=FOUND,
)
async def retry_messages(shard: Shard, call: Call[None, BulkRequest]) -> BulkDone:
    bulk, selection = shard.broker.bulk_messages, _selection(call.body)
    return await (bulk.count(selection) if call.body.dry_run else bulk.retry(selection))


@routes.on_shard(
    "POST",
    "/api/v1/messages/dlq",
    access=Access.READ_WRITE,
    names=names.bulk_dead_letters,
    audited=True,
    placement=by_queue(),
    id="giveUpMessages",
    summary="Dead-letter messages",
    description="Nothing else changes: those that are pending are still delivered. They are named as in a deletion.",
    body=BulkDeadLetterRequest,
    body_example=_BULK_EXAMPLE,
    returns={200: BulkDone},
    errors=FOUND,
)
async def dead_letter_messages(shard: Shard, call: Call[None, BulkDeadLetterRequest]) -> BulkDone:
    bulk, sent = shard.broker.bulk_messages, call.body
    selection = _selection(sent)
    group = sent.consumer_group or QUEUE_MODE
    check_name(group, "ConsumerGroup", "consumerGroup")
    if sent.dry_run:
        return await bulk.count(selection)
    return await bulk.dead_letter(selection, group, sent.error or _BY_OPERATOR)


def _selection(sent: BulkRequest) -> Selection:
    check_name(sent.queue, "Queue", "queue")
    if (sent.messages is None) == (sent.filter is None):
        raise BadRequest("Must specify either 'messages' or 'filter'")
    chosen = sent.filter or BulkFilter()
    if chosen.partition is not None:
        check_name(chosen.partition, "Partition", "filter.partition")
    wanted = SearchFilter(
        sent.queue,
        chosen.partition,
        read_time(chosen.since, "filter.from") if chosen.since is not None else None,
        read_time(chosen.until, "filter.to") if chosen.until is not None else None,
        chosen.status,
        PayloadFilter.of(chosen.text or "", parse_conditions(chosen.where or [])),
    )
    return Selection(sent.queue, sent.messages, wanted, sent.limit, sent.cursor)


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
    of_groups=False,
    audited=True,
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
    audited=True,
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
    names=names.given_up,
    audited=True,
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
