"""Structs of the routes about dead letters."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType, field

from queen.wire.fields import Answer, Body, Count, Limit, Name, Offset, Pagination, Query, Time, Uuid


class DeadLetter(Answer):
    """A message that could not be processed, with a copy of its payload as `data`."""

    id: Uuid
    transaction_id: str
    partition_id: Uuid
    queue: str
    partition: str
    consumer_group: str
    error_message: str | None
    retry_count: Count
    data: Any
    trace_id: str | None
    producer_sub: str | None
    created_at: Time
    failed_at: Time
    unreadable: str | UnsetType = UNSET


class DeadLetterList(Answer):
    """A page of dead letters, newest failure first."""

    messages: list[DeadLetter]
    total: Count
    limit: Count
    offset: Count
    pagination: Pagination


class DeadLetterSelection(Body, rename={"consumer_group": "consumerGroup", "since": "from", "until": "to"}):
    """Which dead letters are meant; what is absent does not matter. Times are those of the failure."""

    queue: Name
    consumer_group: str | None = None
    partition: str | None = None
    since: Time | None = None
    until: Time | None = None


class Retry(DeadLetterSelection, rename={"transaction_ids": "transactionIds"}):
    """Which dead letters are retried, and how many at most."""

    transaction_ids: Annotated[list[str], Meta(max_length=10_000)] | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] | None = None


class Retried(Answer):
    """How many messages were stored again, and how many dead letters are left."""

    success: bool
    queue: str
    retried: Count
    dead_letters_removed: Count
    remaining: Count


class Purged(Answer):
    """How many dead letters were deleted."""

    success: bool
    queue: str
    deleted: Count


class _Filter(Query):
    consumer_group: Annotated[str, Meta(description="Only dead letters of this group.")] = ""
    partition: Annotated[str, Meta(description="Only dead letters of partitions of this name.")] = ""
    since: Annotated[datetime | None, Meta(description="Only messages that failed at this time or later.")] = field(
        default=None, name="from"
    )
    until: Annotated[datetime | None, Meta(description="Only messages that failed at this time or earlier.")] = field(
        default=None, name="to"
    )


class DeadLettersQuery(_Filter):
    """Which dead letters are listed."""

    queue: Annotated[str, Meta(description="Only dead letters of this queue.")] = ""
    limit: Limit = 100
    offset: Offset = 0


class PurgeQuery(_Filter):
    """Which dead letters are deleted; the same filters may be sent as a JSON body instead."""

    queue: Annotated[str, Meta(description="The queue; required here or in the body.")] = ""
    transaction_ids: Annotated[str, Meta(description="Only the dead letter of this transaction id.")] = ""


class DeadLetterReportQuery(Query):
    """Which dead letters are examined: the newest 100 000 that match."""

    queue: Annotated[str, Meta(description="Only of this queue.")] = ""
    consumer_group: Annotated[str, Meta(description="Only of this group.")] = ""
    partition: Annotated[str, Meta(description="Only of partitions of this name.")] = ""
    since: Annotated[datetime | None, Meta(description="Only those that failed at this time or later.")] = field(
        default=None, name="from"
    )
    until: Annotated[datetime | None, Meta(description="Only those that failed at this time or before.")] = field(
        default=None, name="to"
    )
    limit: Limit = 50


class DeadLetterReason(Answer):
    """Dead letters of a queue and group with the same error; the ids are those of the newest."""

    queue: str
    consumer_group: str | None
    error: str
    count: Count
    first_at: Time
    last_at: Time
    max_retries: Count
    partition_id: Uuid
    transaction_id: str


class DeadLetterReport(Answer):
    """How many dead letters were examined, and the errors that caused them, the most frequent first.

    Errors that differ in ids, numbers and quoted texts alone are one.
    """

    total: Count
    reasons: list[DeadLetterReason]
