"""Descriptions of what concerns single messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

from msgspec import UNSET, UnsetType

from queen.broker.inspect.browse import MessageStatus
from queen.http.openapi.operation import (
    DATABASE,
    SEALED,
    Answer,
    Body,
    Count,
    Name,
    Operation,
    Parameter,
    Time,
    Uuid,
    paging,
)

_TAG: Final = "Messages"
_ONE: Final = "/api/v1/messages/{partition}/{transaction}"

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
    """How messages are consumed: by whoever comes (queue), by groups (bus), by both, or not at all."""

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


class MessageReader(Answer):
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
    consumer_groups: list[MessageReader]


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


class GivingUp(Body):
    """For which group, and why."""

    consumer_group: Name | None = None
    error: str | None = None


class MessageGivenUp(_MessageChanged, kw_only=True):
    """The dead letter that the message became."""

    queue: str
    partition: str
    consumer_group: str
    message_id: Uuid


OPERATIONS: Final[Mapping[str, Operation]] = {
    "GET /api/v1/messages": Operation(
        id="messages",
        summary="List messages",
        description="Newest first, without payloads; of the last hour unless `from` is sent.",
        tag=_TAG,
        parameters=(
            Parameter("queue", "Only of this queue.", Name),
            Parameter("partition", "Only of partitions of this name.", Name),
            Parameter("ns", "Only of queues of this namespace.", Name),
            Parameter("task", "Only of queues of this task.", Name),
            Parameter("status", "Only of this status.", MessageStatus),
            Parameter("from", "Only stored at this time or later.", Time),
            Parameter("to", "Only stored until the end of this minute.", Time),
            *paging(200),
        ),
        answers={200: MessageList},
        errors=DATABASE,
    ),
    f"GET {_ONE}": Operation(
        id="message",
        summary="Everything about one message",
        tag=_TAG,
        answers={200: MessageView},
        errors=(404, 409, 503),
    ),
    f"DELETE {_ONE}": Operation(
        id="deleteMessage",
        summary="Delete a message, its dead letters and its traces",
        description="Who has leased it keeps what was delivered.",
        tag=_TAG,
        answers={200: MessageDeleted},
        errors=SEALED,
    ),
    f"POST {_ONE}/retry": Operation(
        id="retryMessage",
        summary="Store a copy at the tail of its partition",
        description="The copy is for every group, and the message's dead letters are removed.",
        tag=_TAG,
        answers={200: MessageRetried},
        errors=(404, 409, 503),
    ),
    f"POST {_ONE}/dlq": Operation(
        id="giveUpMessage",
        summary="Make a message a dead letter",
        description="Nothing else changes: if it is pending it is still delivered.",
        tag=_TAG,
        parameters=(Parameter("consumerGroup", "For this group.", Name),),
        body=GivingUp,
        body_required=False,
        answers={200: MessageGivenUp},
        errors=(404, 409, 503),
    ),
}
