"""The types that request and response structs of the HTTP API share."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from queen.wire.push import LONGEST_NAME, PRINTABLE

_PRINTABLE: Final = {"pattern": PRINTABLE}
CHECKED: Final = "checked"
"""Marks parameters of a query that are names."""
CLAMPED: Final = "clamped"
"""Marks numbers of a query that become the nearest in range, or count as absent when they are none."""

Name: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=LONGEST_NAME, extra_json_schema=_PRINTABLE, extra={CHECKED: True})
]
OptionalName: TypeAlias = Annotated[
    str, Meta(max_length=LONGEST_NAME, extra_json_schema=_PRINTABLE, extra={CHECKED: True})
]
Uuid: TypeAlias = Annotated[str, Meta(extra_json_schema={"format": "uuid"})]
Time: TypeAlias = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
LARGEST_INT: Final = 2**31 - 1
LARGEST_BIGINT: Final = 2**63 - 1
Seconds: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST_INT, description="Seconds")]
QueueFilter: TypeAlias = Annotated[OptionalName, Meta(description="Only this queue.")]
NamespaceFilter: TypeAlias = Annotated[OptionalName, Meta(description="Only queues of this namespace.")]
TaskFilter: TypeAlias = Annotated[OptionalName, Meta(description="Only queues of this task.")]

Limit: TypeAlias = Annotated[
    int,
    Meta(
        ge=1,
        le=1000,
        description="The largest number of entries to return; a number out of range becomes the nearest in range.",
        extra={CLAMPED: True},
    ),
]
Offset: TypeAlias = Annotated[
    int, Meta(ge=0, le=1 << 53, description="The number of entries to skip.", extra={CLAMPED: True})
]
WaitMillis: TypeAlias = Annotated[
    int,
    Meta(ge=0, description="How long to wait, in milliseconds; DEFAULT_TIMEOUT when absent.", extra={CLAMPED: True}),
]
Search: TypeAlias = Annotated[OptionalName, Meta(description="Only those with this text in their name, in any case.")]
Order: TypeAlias = Annotated[
    Literal["asc", "desc"] | None, Meta(description="Ascending or descending; by default as `sort` says.")
]


class Query(msgspec.Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    """The query of a request, parsed by `queen.http.routing.query`. A parameter that is empty counts as absent.

    It is shared among requests with the same query: never change it.
    """


class Page(Query):
    """A page of a list."""

    limit: Limit = 1000
    offset: Offset = 0


class PrefixPage(Page):
    """A page of what has keys."""

    prefix: Annotated[OptionalName, Meta(description="Only keys that begin with this text.")] = ""
    limit: Limit = 100


class TimeSpan(Query):
    """A span of time."""

    since: Annotated[datetime | None, Meta(description="The beginning, inclusive.")] = msgspec.field(
        default=None, name="from"
    )
    until: Annotated[datetime | None, Meta(description="The end, exclusive; now when absent.")] = msgspec.field(
        default=None, name="to"
    )


class Body(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """What a client sends. Fields that are not named here are refused."""


class Answer(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """What the server answers. A later version may add fields."""


class SnakeAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """An answer whose fields have underscores."""


class Error(Answer):
    """Why a request was refused: what is wrong, where, and what to do."""

    error: str
    detail: str | msgspec.UnsetType = msgspec.UNSET
    """Which resource of the request the token does not permit."""
    code: str | msgspec.UnsetType = msgspec.UNSET
    """A machine-readable error code; for keys and values, locks and timers alone."""
    success: bool | msgspec.UnsetType = msgspec.UNSET


class Pagination(Answer):
    """The page that was answered; `total` counts what all pages hold together."""

    limit: Count
    offset: Count
    total: Count | msgspec.UnsetType = msgspec.UNSET
