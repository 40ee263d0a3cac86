"""Structs of the routes about single messages."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, UnsetType, field

from queen.wire.api.fields import Answer, Body, Count, Limit, Name, Offset, Query, Time, Uuid


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
    """A message without its payload; `queueStatus` is how consumers without a group see it."""

    queue_status: MessageStatus | None
    bus_status: BusStatus
    queue_priority: int


class ConsumptionMode(Answer):
    """How messages are consumed: without groups (queue), by groups (bus), by both, or not at all."""

    has_queue_mode: bool
    bus_groups_count: Count
    type: Mode
    consumed_by_groups: Count | UnsetType = UNSET


class MessageList(Answer):
    """A page of messages, newest first."""

    messages: list[MessageInList]
    total: Count
    limit: Count
    offset: Count
    mode: ConsumptionMode


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
    limit: Limit = 200
    offset: Offset = 0


class DeadLetterQuery(Query):
    """The group that the dead letter belongs to."""

    consumer_group: Annotated[str, Meta(description="The consumer group.")] = ""
