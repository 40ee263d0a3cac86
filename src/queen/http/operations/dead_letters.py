"""Descriptions of what concerns dead letters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import UNSET, Meta, UnsetType

from queen.http.openapi.operation import (
    DATABASE,
    FOUND,
    Answer,
    Body,
    Count,
    Name,
    Operation,
    Pagination,
    Parameter,
    Time,
    Uuid,
    paging,
)

_TAG: Final = "Dead letters"


class DeadLetter(Answer):
    """A message that was given up on, with a copy of its payload as `data`."""

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
    """Which dead letters to send round again, and how many at most."""

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
    """How many dead letters were thrown away."""

    success: bool
    queue: str
    deleted: Count


_FILTER: Final = (
    Parameter("consumerGroup", "Only of this group.", Name),
    Parameter("partition", "Only of partitions of this name.", Name),
    Parameter("from", "Only failed at this time or later.", Time),
    Parameter("to", "Only failed at this time or earlier.", Time),
)

OPERATIONS: Final[Mapping[str, Operation]] = {
    "GET /api/v1/dlq": Operation(
        id="deadLetters",
        summary="List dead letters",
        tag=_TAG,
        parameters=(Parameter("queue", "Only of this queue.", Name), *_FILTER, *paging(100)),
        answers={200: DeadLetterList},
        errors=DATABASE,
    ),
    "POST /api/v1/dlq/retry": Operation(
        id="retryDeadLetters",
        summary="Send dead letters round again",
        description="Their messages are stored at the tails of their partitions, those that failed first before the "
        "others, and the dead letters are removed.",
        tag=_TAG,
        body=Retry,
        body_example={"queue": "orders", "consumerGroup": "workers", "limit": 100},
        answers={200: Retried},
        errors=(404, 409, 503),
    ),
    "DELETE /api/v1/dlq": Operation(
        id="purgeDeadLetters",
        summary="Throw dead letters away",
        description="Their messages stay in their partitions. The same filters may be sent as a JSON body instead.",
        tag=_TAG,
        parameters=(
            Parameter("queue", "The queue.", Name, required=True),
            *_FILTER,
            Parameter("transactionIds", "Only of this message.", str),
        ),
        answers={200: Purged},
        errors=FOUND,
    ),
}
