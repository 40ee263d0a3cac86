"""Structs of the routes about single messages."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, UnsetType, field

from queen.wire.fields import Answer, Body, Count, Limit, Name, Offset, OptionalName, Query, Time, Uuid


class MessageStatus(StrEnum):
    PENDING = "pending"
    PROCESSING = "processing"
    COMPLETED = "completed"
    DEAD_LETTER = "dead_letter"


Mode: TypeAlias = Literal["none", "queue", "bus", "hybrid"]


class _AboutMessage(Answer, kw_only=True):
    id: Uuid
    transaction_id: str | None
    partition_id: Uuid
    queue_path: str
    queue: str
    partition: str
    namespace: str
    task: str
    trace_id: str | None
    producer_sub: str | None
    created_at: Time
    status: MessageStatus
    lease_expires_at: Time | None
    unreadable: str | UnsetType = UNSET


class BusStatus(Answer):
    """How many of the groups have consumed a message."""

    consumed_by: Count
    total_groups: Count


class MessageInList(_AboutMessage, kw_only=True):
    """A message with at most the beginning of its payload; `queueStatus` is how consumers without a group see it."""

    queue_status: MessageStatus | None
    bus_status: BusStatus
    queue_priority: int
    preview: str | UnsetType = UNSET


class ConsumptionMode(Answer):
    """How messages are consumed: without groups (queue), by groups (bus), by both, or not at all."""

    has_queue_mode: bool
    bus_groups_count: Count
    type: Mode
    consumed_by_groups: Count | UnsetType = UNSET


class MessageList(Answer):
    """A page of messages, newest first. Unless all that match were `counted`, there are at least `total`."""

    messages: list[MessageInList]
    total: Count
    limit: Count
    offset: Count
    mode: ConsumptionMode
    counted: bool


class MessageQueue(Answer):
    """The options of the message's queue that concern its delivery."""

    lease_time: Count
    retry_limit: Count
    retry_delay: Count
    ttl: Count | None
    priority: int


class MessageConsumer(Answer):
    """Whether a group has consumed the message."""

    name: str
    consumed: bool
    lease_expires_at: Time | None


class MessageView(_AboutMessage, kw_only=True):
    """Everything about one message."""

    payload: Any
    is_encrypted: bool
    error_message: str | None
    retry_count: Count | None
    queue_config: MessageQueue
    mode: ConsumptionMode
    consumer_groups: list[MessageConsumer]


class _MessageChanged(Answer, kw_only=True):
    success: bool
    partition_id: str
    transaction_id: str


class MessageDeleted(_MessageChanged, kw_only=True):
    """`success` is false when there was no such message."""

    message: str
    queue: str | UnsetType = UNSET
    partition: str | UnsetType = UNSET


class MessageRetried(_MessageChanged, kw_only=True):
    """The copy that was stored at the tail of the partition."""

    queue: str
    partition: str
    retried: bool
    new_transaction_id: str | None
    new_message_id: Uuid | None
    dead_letters_removed: Count


class DeadLetterRequest(Body):
    """The group that the dead letter belongs to, and its error text."""

    consumer_group: Name | None = None
    error: str | None = None


class MessageDeadLettered(_MessageChanged, kw_only=True):
    """The dead letter that the message became."""

    queue: str
    partition: str
    consumer_group: str
    message_id: Uuid


class MessagesQuery(Query):
    """Which messages are listed."""

    queue: Annotated[str, Meta(description="Only messages of this queue.")] = ""
    partition: Annotated[str, Meta(description="Only messages of partitions of this name.")] = ""
    ns: Annotated[str, Meta(description="Only messages of queues of this namespace.")] = ""
    task: Annotated[str, Meta(description="Only messages of queues of this task.")] = ""
    status: Annotated[MessageStatus | None, Meta(description="Only messages of this status.")] = None
    since: Annotated[datetime | None, Meta(description="Only messages stored at this time or later.")] = field(
        default=None, name="from"
    )
    until: Annotated[datetime | None, Meta(description="Only messages stored until the end of this minute.")] = field(
        default=None, name="to"
    )
    count: Annotated[bool, Meta(description="Whether all that match are counted, or no more than a page takes.")] = True
    preview: Annotated[
        int, Meta(ge=0, le=1000, description="With so many characters of each payload's JSON, from its beginning.")
    ] = 0
    limit: Limit = 200
    offset: Offset = 0


class SearchQuery(Query):
    """What is searched, and where the search goes on."""

    queue: Annotated[Name, Meta(description="The queue.")]
    partition: Annotated[OptionalName, Meta(description="Only this partition.")] = ""
    status: Annotated[MessageStatus | None, Meta(description="Only messages of this status.")] = None
    since: Annotated[datetime | None, Meta(description="Only messages stored at this time or later.")] = field(
        default=None, name="from"
    )
    until: Annotated[datetime | None, Meta(description="Only messages stored before this time.")] = field(
        default=None, name="to"
    )
    text: Annotated[str, Meta(description="Only messages with this text in the JSON of their payload.")] = ""
    where: Annotated[
        str,
        Meta(
            description="Only messages of whose payload this holds: `path=value`, with `=`, `!=`, `>`, `<`, `>=` or "
            "`<=`, or a JSON array of up to 20 of these, all of which have to hold."
        ),
    ] = ""
    limit: Limit = 50
    cursor: Annotated[str, Meta(description="What the call before answered.")] = ""


class SearchedMessage(MessageInList, kw_only=True):
    """A message that was found, with its place in its partition and its payload."""

    offset: Count
    data: Any


class SearchResult(Answer):
    """Messages that were found, and how many were examined; a `cursor` continues the search."""

    messages: list[SearchedMessage]
    scanned: Count
    cursor: str | None


class MessageRef(Body):
    """Names a message."""

    partition_id: Uuid
    transaction_id: str


class BulkFilter(Body, kw_only=True):
    """Which messages are meant, as in a search."""

    partition: Name | None = None
    status: MessageStatus | None = None
    since: Time | None = field(default=None, name="from")
    until: Time | None = field(default=None, name="to")
    text: str | None = None
    where: list[str] | None = None


class BulkRequest(Body, kw_only=True):
    """Messages of a queue: those named in `messages`, or those that pass the `filter`, from the `cursor` on."""

    queue: Name
    messages: Annotated[list[MessageRef], Meta(max_length=10_000)] | None = None
    filter: BulkFilter | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000, description="How many at most, by a filter.")] = 1000
    cursor: str | None = None
    dry_run: Annotated[bool, Meta(description="Only count them.")] = False


class BulkDeadLetterRequest(BulkRequest, kw_only=True):
    """The same, with the group that the dead letters belong to, and their error text."""

    consumer_group: Name | None = None
    error: str | None = None


class BulkFailure(Answer):
    """A message with which it failed, and why."""

    partition_id: Uuid
    transaction_id: str
    error: str


class BulkDone(Answer):
    """How many messages were meant, and what became of them; up to ten `errors` are given.

    By a filter, `scanned` messages were looked at; while there is a `cursor`, there may be more.
    """

    success: bool
    queue: str
    matched: Count
    done: Count
    not_found: Count
    failed: Count
    errors: list[BulkFailure]
    scanned: Count
    cursor: str | None


class DeadLetterQuery(Query):
    """The group that the dead letter belongs to."""

    consumer_group: Annotated[str, Meta(description="The consumer group.")] = ""
