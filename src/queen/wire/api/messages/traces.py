"""Structs of the routes about traces."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from queen.wire.fields import Answer, Body, Count, Limit, Name, Page, Pagination, Search, SnakeAnswer, Time, Uuid


class TraceRequest(Body):
    """A trace event of a message; it is found by message and by its names."""

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
    """A trace event of a message."""


class TraceByName(_AboutTrace, kw_only=True):
    """A trace event with the payload of its message."""

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
    """A trace name and its counts."""

    trace_name: str
    trace_count: Count
    message_count: Count
    last_seen: Time | None


class TraceNameList(SnakeAnswer):
    """A page of names, the one used last first."""

    trace_names: list[TraceName]
    total: Count
    pagination: Pagination


class TraceNamesQuery(Page):
    """A page of trace names."""

    search: Search = ""
    limit: Limit = 50


class NamedTracesQuery(Page):
    """A page of the traces of a name."""

    limit: Limit = 100
