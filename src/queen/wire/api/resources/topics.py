"""Structs of the routes about topics."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from queen.wire.fields import (
    CLAMPED,
    Count,
    Limit,
    Name,
    Offset,
    OptionalName,
    Query,
    Search,
    Seconds,
    SnakeAnswer,
    Time,
    WaitMillis,
)
from queen.wire.topics.requests import LONGEST_LEASE

Id: TypeAlias = Annotated[
    int | str,
    Meta(description="64 bits that sort by time: a number, or with `ids=string` (or the header `X-Queen-Ids`) a text."),
]


class TopicItem(SnakeAnswer):
    """An item. It has `payload` (base64) or `data` (JSON), as it was enqueued."""

    id: Id
    namespace: str
    topic: str
    idempotency_key: str | None
    priority: int
    metadata: dict[str, Any] | None
    deliver_after: Time
    status: Literal["ready", "leased", "dead"]
    retries: Count
    created_at: Time
    first_failed_at: Time | None
    last_error: str | None
    updated_at: Time
    expires_at: Time | None
    lease_expires_at: Time | None
    lease_owner: str | None
    payload: str | UnsetType = UNSET
    data: Any = UNSET


class TopicDeadLetter(SnakeAnswer):
    """An item that was given up on."""

    id: Id
    namespace: str
    topic: str
    idempotency_key: str | None
    priority: int
    metadata: dict[str, Any] | None
    deliver_after: Time
    status: Literal["dead"]
    retries: Count
    created_at: Time
    first_failed_at: Time | None
    last_error: str | None
    original_id: Id
    moved_at: Time
    payload: str | UnsetType = UNSET
    data: Any = UNSET


class Settled(SnakeAnswer):
    """What came of one item that a request named."""

    id: Id
    success: bool
    error: str | None


class NackSettled(SnakeAnswer):
    """What became of an item that failed: a dead letter, or ready again in so many seconds."""

    id: Id
    success: bool
    error: str | None
    dlq: bool | UnsetType = UNSET
    retry_in_seconds: float | UnsetType = UNSET


class ExtendSettled(SnakeAnswer):
    """Until when the lease lasts now."""

    id: Id
    success: bool
    error: str | None
    lease_expires_at: Time | UnsetType = UNSET


class TopicOptions(SnakeAnswer):
    """Options of a topic."""

    max_retries: Annotated[int, Meta(ge=0, le=1_000_000)] = 3
    backoff_base_ms: Annotated[int, Meta(ge=0, le=86_400_000, description="Milliseconds")] = 1000
    backoff_cap_ms: Annotated[int, Meta(ge=0, le=86_400_000, description="Milliseconds")] = 300_000
    lease_seconds: Annotated[int, Meta(ge=1, le=604_800, description="Seconds")] = 30
    at_most_once: bool = False
    ttl_seconds: Seconds | None = None


class ConfiguredTopic(SnakeAnswer):
    """A topic and its options."""

    namespace: str
    topic: str
    options: TopicOptions


class TopicCounts(SnakeAnswer):
    """How many items a topic has in each state; `delayed` are ready and not due yet."""

    namespace: str
    topic: str
    ready: Count
    delayed: Count
    leased: Count
    dead: Count
    options: TopicOptions
    paused: bool


class PriorityCounts(SnakeAnswer):
    """How many items of one priority a topic has in each state."""

    priority: int
    ready: Count
    delayed: Count
    leased: Count


class PausedTopic(SnakeAnswer):
    """Whether a topic delivers nothing for now, and whether that is a change."""

    namespace: str
    topic: str
    paused: bool
    changed: bool


class PurgedTopic(SnakeAnswer):
    """How many items were removed."""

    namespace: str
    topic: str
    removed: Count


class DeletedTopic(SnakeAnswer):
    """Whether there was such a topic."""

    namespace: str
    topic: str
    deleted: bool


class Quota(SnakeAnswer):
    """Items that a namespace may enqueue in any minute; null: as many as it likes."""

    namespace: str
    per_minute: Count | None


WriteMode: TypeAlias = Literal["sync", "buffered"]


class Mode(SnakeAnswer):
    """How a namespace is written to."""

    namespace: str
    mode: WriteMode


_Ids: TypeAlias = Annotated[
    str, Meta(description="`string` to have ids as text, for clients whose numbers end at 2^53.")
]
_Namespace: TypeAlias = Annotated[Name, Meta(description="The namespace.")]
_Topic: TypeAlias = Annotated[Name, Meta(description="The topic.")]


class IdsQuery(Query):
    """How ids are written."""

    ids: _Ids = ""


class NamespaceQuery(Query):
    """A namespace."""

    namespace: _Namespace


class TopicQuery(NamespaceQuery):
    """A topic."""

    topic: _Topic


class _DequeueOptions(NamespaceQuery):
    limit: Annotated[int, Meta(ge=1, le=10_000, description="Items to return at most.", extra={CLAMPED: True})] = 10
    wait: Annotated[bool, Meta(description="Wait for items when there are none.")] = False
    timeout: WaitMillis | None = None
    lease: (
        Annotated[
            float,
            Meta(
                gt=0, le=LONGEST_LEASE, description="Seconds until the lease expires; those of the topic when absent."
            ),
        ]
        | None
    ) = None
    ids: _Ids = ""


class DequeueQuery(_DequeueOptions, kw_only=True):
    """The parameters of a dequeue."""

    topic: _Topic


class DequeueManyQuery(_DequeueOptions):
    """The parameters of a dequeue from several topics."""

    topics: Annotated[
        str, Meta(description="A JSON array of topics, up to 1000; all of the namespace when absent.")
    ] = ""


class TopicDeadLettersQuery(TopicQuery):
    """A page of the dead letters of a topic."""

    limit: Limit = 10
    offset: Offset = 0
    ids: _Ids = ""


class PeekQuery(TopicQuery):
    """The items that are shown."""

    limit: Limit = 10
    offset: Offset = 0
    delayed: Annotated[bool, Meta(description="Show items that are not due yet too.")] = False
    leased: Annotated[bool, Meta(description="Show the items that are leased, and no others.")] = False
    ids: _Ids = ""


class PrioritiesQuery(TopicQuery):
    """The priorities that are listed, those that are served first."""

    limit: Limit = 100


class CountsQuery(NamespaceQuery):
    """The topics that are counted."""

    topic: Annotated[OptionalName, Meta(description="Only this topic.")] = ""
    search: Search = ""
    limit: Limit | None = None
    offset: Offset | None = None
