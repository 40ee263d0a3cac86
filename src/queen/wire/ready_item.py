"""An item in a ready queue: rendered when it is put there, so that to hand it out is to put pieces of JSON together."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class ReadyItem(msgspec.Struct, array_like=True):
    """`due` and `expires` are microseconds since 1970; `rendered` is the item as JSON between its id and its lease.

    A payload that is too large to be kept twice is not part of it (`whole` is false then): PostgreSQL has it.
    """

    id: int
    topic_id: int
    priority: int
    due: int
    expires: int | None
    whole: bool
    rendered: bytes
    lease_owner: str | None = None
    leased_until: datetime | None = None
    updated_at: datetime | None = None

    def __getitem__(self, column: str) -> Any:
        return getattr(self, column)

    @property
    def place(self) -> tuple[int, int, int]:
        """Its place in the order of service."""
        return self.priority, self.due, self.id


def to_micros(moment: datetime) -> int:
    return (moment - _EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)
