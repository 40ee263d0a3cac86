"""The audit log."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from queen.wire.fields import Answer, Limit, Query, Time


class AuditQuery(Query):
    """Which entries to list."""

    actor: str = ""
    """The subject that did it."""
    action: str = ""
    """What the action begins with, such as `DELETE` or `POST /api/v1/configure`."""
    limit: Limit = 100
    before: Annotated[int, Meta(ge=0)] = 0
    """The id below which the page begins: the last id of the page before."""


class AuditEntry(Answer):
    """One thing that was done, or was tried."""

    id: int
    at: Time
    actor: str | None
    address: str
    action: str
    object: str
    status: int | None
    before: Any
    after: Any


class AuditLog(Answer):
    """A page of the audit log, the newest first."""

    entries: list[AuditEntry]
