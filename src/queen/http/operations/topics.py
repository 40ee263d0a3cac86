"""Descriptions of the routes of topics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from queen.http.openapi.operation import (
    DATABASE,
    FOUND,
    Count,
    Media,
    Name,
    Operation,
    OptionalName,
    Parameter,
    SnakeAnswer,
    Time,
    paging,
)
from queen.wire.topics import (
    LONGEST_LEASE,
    ConfigureBody,
    ExtendRef,
    ItemRef,
    ModeBody,
    NackRef,
    Priority,
    QuotaBody,
    Seconds,
    TopicName,
)

_TAG: Final = "Topics"

Id: TypeAlias = Annotated[
    int | str,
    Meta(description="64 bits that sort by time: a number, or with `ids=string` (or the header `X-Queen-Ids`) a text."),
]


class ItemToEnqueue(Struct):
    """An item: `payload` in base64 or `data`, any JSON; due now, at `deliver_after`, or after `delay` seconds."""

    namespace: Name
    topic: Name
    payload: Annotated[str, Meta(extra_json_schema={"contentEncoding": "base64"})] | None = None
    data: Any = None
    idempotency_key: OptionalName | None = None
    priority: Annotated[Priority, Meta(description="Lower is served first.")] | None = None
    metadata: dict[str, Any] | None = None
    deliver_after: Time | None = None
    delay: Seconds | None = None
    ttl: Annotated[Seconds, Meta(description="Seconds that it may wait once it is due.")] | None = None


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
    max_retries: Count
    backoff_base_ms: Count
    backoff_cap_ms: Count
    lease_seconds: Count
    at_most_once: bool
    ttl_seconds: Count | None


class ConfiguredTopic(SnakeAnswer):
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


class PurgedTopic(SnakeAnswer):
    namespace: str
    topic: str
    removed: Count


class DeletedTopic(SnakeAnswer):
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


_IDS: Final = Parameter("ids", "`string` to have ids as text, for clients whose numbers end at 2^53.", str)
_NAMESPACE: Final = Parameter("namespace", "The namespace.", Name, required=True)
_TOPIC: Final = (_NAMESPACE, Parameter("topic", "The topic.", Name, required=True))
_LIMIT: Final = Annotated[int, Meta(ge=1, le=10_000)]
_LEASE: Final = Annotated[float, Meta(gt=0, le=LONGEST_LEASE)]
_TIMEOUT: Final = Annotated[int, Meta(ge=0)]
_EXAMPLE: Final = {"namespace": "payments", "topic": "refunds", "data": {"order": 7}, "priority": 1, "delay": 30}
_ONE: Final = "One item may be sent without the array."
_OK: Final = Media("text/plain")

_ENQUEUE: Final = Operation(
    id="enqueue",
    summary="Enqueue items",
    description="All or none are stored. The answer has the ids in the order of the items; an item whose "
    "`idempotency_key` its namespace knows is not stored again, and answered with the id of the first.",
    tag=_TAG,
    parameters=(_IDS,),
    body=list[ItemToEnqueue],
    body_example=[_EXAMPLE],
    answers={200: list[Id]},
    errors=(429, 503),
)
_HOW: Final = (
    Parameter("limit", "How many to answer at most.", _LIMIT, 10),
    Parameter("wait", "Whether to wait when nothing is there.", bool, False),
    Parameter("timeout", "How long to wait, in milliseconds; DEFAULT_TIMEOUT when absent.", _TIMEOUT),
    Parameter("lease", "Seconds until the lease ends; those of the topic when absent.", _LEASE),
    _IDS,
)
_DEQUEUE: Final = Operation(
    id="dequeue",
    summary="Lease the next items",
    description="By priority (lower first), then by the time they became due, then by id. Nothing is given before its "
    "`deliver_after`. Items that are not acknowledged before their lease ends are given again.",
    tag=_TAG,
    parameters=(*_TOPIC, *_HOW),
    answers={200: list[TopicItem]},
    errors=DATABASE,
)
_ACK: Final = Operation(
    id="ackItems",
    summary="Items are done",
    description=f"They are gone for good. {_ONE}",
    tag=_TAG,
    parameters=(_IDS,),
    body=list[ItemRef],
    answers={200: list[Settled]},
    errors=DATABASE,
)
_NACK: Final = Operation(
    id="nackItems",
    summary="Items failed",
    description=f"They are given again after a while that doubles each time, or become dead letters. {_ONE}",
    tag=_TAG,
    parameters=(_IDS,),
    body=list[NackRef],
    answers={200: list[NackSettled]},
    errors=DATABASE,
)
_ACTIVE: Final = Operation(
    id="activeTopics",
    summary="Topics that have ready or leased items",
    tag=_TAG,
    parameters=(_NAMESPACE,),
    answers={200: list[str]},
    errors=DATABASE,
)
_DEAD: Final = Operation(
    id="topicDeadLetters",
    summary="List the dead letters of a topic",
    tag=_TAG,
    parameters=(*_TOPIC, *paging(10), _IDS),
    answers={200: list[TopicDeadLetter]},
    errors=DATABASE,
)
_DELETE_DEAD: Final = Operation(
    id="deleteTopicDeadLetters",
    summary="Throw dead letters of topics away",
    description=_ONE,
    tag=_TAG,
    parameters=(_IDS,),
    body=_ACK.body,
    answers=_ACK.answers,
    errors=DATABASE,
)
_RETRY_DEAD: Final = replace(
    _DELETE_DEAD,
    id="retryTopicDeadLetters",
    summary="Send dead letters of topics round again",
    description=f"They are ready at once, with no retries used. {_ONE}",
)

_NATIVE: Final[Mapping[str, Operation]] = {
    "POST /api/v1/topics/enqueue": _ENQUEUE,
    "GET /api/v1/topics/dequeue": _DEQUEUE,
    "POST /api/v1/topics/ack": _ACK,
    "POST /api/v1/topics/nack": _NACK,
    "GET /api/v1/topics": _ACTIVE,
    "GET /api/v1/topics/dlq": _DEAD,
    "POST /api/v1/topics/dlq/delete": _DELETE_DEAD,
    "POST /api/v1/topics/dlq/retry": _RETRY_DEAD,
}


def _short(path: str, operation: Operation) -> tuple[str, Operation]:
    """The same route as clients of mqueue call it: acknowledgments one by one."""
    method, _, rest = path.partition(" /api/v1/topics")
    changes: dict[str, Any] = {"id": f"{operation.id}Short", "summary": f"{operation.summary} (as mqueue does)"}
    if operation.body in (_ACK.body, _NACK.body):
        changes |= {"body": NackRef if operation is _NACK else ItemRef, "answers": {200: _OK}, "errors": FOUND}
    return f"{method} {rest or '/topics'}", replace(operation, **changes)


OPERATIONS: Final[Mapping[str, Operation]] = {
    **_NATIVE,
    **dict(_short(path, operation) for path, operation in _NATIVE.items()),
    "GET /api/v1/topics/dequeue/many": replace(
        _DEQUEUE,
        id="dequeueMany",
        summary="Lease the next items of several topics",
        description="As if they were one: by priority, then by the time they became due, then by id, over all of them.",
        parameters=(
            _NAMESPACE,
            Parameter("topics", "A JSON array of topics, up to 1000; all of the namespace when absent.", str),
            *_HOW,
        ),
    ),
    "POST /api/v1/topics/extend": Operation(
        id="extendItems",
        summary="Make leases of items last longer",
        description=f"So many `seconds` from now, by default as long as a lease of the topic; never shorter. {_ONE}",
        tag=_TAG,
        parameters=(_IDS,),
        body=list[ExtendRef],
        answers={200: list[ExtendSettled]},
        errors=DATABASE,
    ),
    "POST /api/v1/topics/release": replace(
        _ACK,
        id="releaseItems",
        summary="Give leased items back",
        description=f"They are ready as before, for anybody, and have not failed: nothing is counted. {_ONE}",
    ),
    "GET /api/v1/topics/peek": Operation(
        id="peekTopic",
        summary="Look at the next items without leasing them",
        tag=_TAG,
        parameters=(
            *_TOPIC,
            paging(10)[0],
            Parameter("delayed", "Whether to show also what is not due yet.", bool, False),
            _IDS,
        ),
        answers={200: list[TopicItem]},
        errors=DATABASE,
    ),
    "GET /api/v1/topics/counts": Operation(
        id="topicCounts",
        summary="How many items topics have, and their options",
        tag=_TAG,
        parameters=(_NAMESPACE, Parameter("topic", "Only this topic.", Name)),
        answers={200: list[TopicCounts]},
        errors=DATABASE,
    ),
    "POST /api/v1/topics/configure": Operation(
        id="configureTopic",
        summary="Set options of a topic",
        description="Options that are not sent stay as they are; null stands for the default. A topic that does not "
        "exist is made.",
        tag=_TAG,
        body=ConfigureBody,
        body_example={"namespace": "payments", "topic": "refunds", "options": {"max_retries": 5, "ttl_seconds": 3600}},
        answers={200: ConfiguredTopic},
        errors=DATABASE,
    ),
    "POST /api/v1/topics/purge": Operation(
        id="purgeTopic",
        summary="Remove all items of a topic",
        description="Leased ones too; dead letters and options stay.",
        tag=_TAG,
        body=TopicName,
        answers={200: PurgedTopic},
        errors=DATABASE,
    ),
    "DELETE /api/v1/topics": Operation(
        id="deleteTopic",
        summary="Delete a topic with all that is in it",
        tag=_TAG,
        parameters=_TOPIC,
        answers={200: DeletedTopic},
        errors=DATABASE,
    ),
    "GET /api/v1/topics/quotas": Operation(
        id="quotas",
        summary="Quotas by namespace, in items per minute",
        tag=_TAG,
        answers={200: dict[str, Count]},
        errors=DATABASE,
    ),
    "PUT /api/v1/topics/quotas": Operation(
        id="setQuota",
        summary="Set the quota of a namespace",
        description="It wins over NAMESPACE_QUOTAS; null lets NAMESPACE_QUOTAS decide again.",
        tag=_TAG,
        body=QuotaBody,
        body_example={"namespace": "payments", "per_minute": 5000},
        answers={200: Quota},
        errors=DATABASE,
    ),
    "GET /api/v1/topics/modes": Operation(
        id="writeModes",
        summary="Write modes by namespace",
        description="Namespaces that are not named are `sync`.",
        tag=_TAG,
        answers={200: dict[str, WriteMode]},
        errors=DATABASE,
    ),
    "PUT /api/v1/topics/modes": Operation(
        id="setWriteMode",
        summary="Set the write mode of a namespace",
        description="`sync`: items are in PostgreSQL before they are answered. `buffered`: they are in a log on disk, "
        "and soon in PostgreSQL. It wins over NAMESPACE_MODES; null lets NAMESPACE_MODES decide again.",
        tag=_TAG,
        body=ModeBody,
        body_example={"namespace": "payments", "mode": "buffered"},
        answers={200: Mode},
        errors=DATABASE,
    ),
}
