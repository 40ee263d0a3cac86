"""Descriptions of what concerns traces."""

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
    SnakeAnswer,
    Time,
    Uuid,
    paging,
)

_TAG: Final = "Traces"


class TraceRequest(Body):
    """Something to say about a message, findable by the names it is given."""

    transaction_id: Annotated[str, Meta(min_length=1)]
    partition_id: Annotated[str, Meta(min_length=1)]
    data: Any
    consumer_group: Name | None = None
    event_type: Name | None = None
    trace_names: Annotated[list[Name], Meta(max_length=50)] | Name | None = None


class TraceStored(Answer):
    """The id of the trace."""

    success: bool
    trace_id: Uuid


class _AboutTrace(SnakeAnswer, kw_only=True):
    id: Uuid
    event_type: str
    data: Any
    consumer_group: str | None
    worker_id: str | None
    created_at: Time
    trace_names: list[str]
    unreadable: str | UnsetType = UNSET


class TraceOfMessage(_AboutTrace, kw_only=True):
    """What was said about a message."""


class TraceByName(_AboutTrace, kw_only=True):
    """What was said under a name, with what the message carries."""

    transaction_id: str
    partition_id: Uuid
    queue_name: str
    partition_name: str
    message_payload: Any


class TraceList(SnakeAnswer):
    """A page of the traces of a message, oldest first."""

    traces: list[TraceOfMessage]
    total: Count
    pagination: Pagination


class NamedTraceList(SnakeAnswer):
    """A page of the traces of a name, oldest first."""

    traces: list[TraceByName]
    total: Count
    pagination: Pagination


class TraceName(SnakeAnswer):
    """A name, and how much was said under it."""

    trace_name: str
    trace_count: Count
    message_count: Count
    last_seen: Time | None


class TraceNameList(SnakeAnswer):
    """A page of names, the one used last first."""

    trace_names: list[TraceName]
    total: Count
    pagination: Pagination


OPERATIONS: Final[Mapping[str, Operation]] = {
    "POST /api/v1/traces": Operation(
        id="addTrace",
        summary="Say something about a message",
        tag=_TAG,
        body=TraceRequest,
        body_example={
            "transactionId": "order-1",
            "partitionId": "00000000-0000-8000-8000-000000000001",
            "data": {"text": "charged the card"},
            "traceNames": ["customer-7"],
        },
        answers={201: TraceStored},
        errors=FOUND,
    ),
    "GET /api/v1/traces/names": Operation(
        id="traceNames",
        summary="List the names of traces",
        tag=_TAG,
        parameters=paging(50),
        answers={200: TraceNameList},
        errors=DATABASE,
    ),
    "GET /api/v1/traces/by-name/{name}": Operation(
        id="tracesByName",
        summary="What was said under a name",
        tag=_TAG,
        parameters=paging(100),
        answers={200: NamedTraceList},
        errors=DATABASE,
    ),
    "GET /api/v1/traces/{partition}/{transaction}": Operation(
        id="tracesOfMessage",
        summary="What was said about a message",
        tag=_TAG,
        parameters=paging(1000),
        answers={200: TraceList},
        errors=DATABASE,
    ),
}
