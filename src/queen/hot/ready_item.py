"""An item in a ready queue: what a consumer is given, but for the lease."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec


class ReadyItem(msgspec.Struct, array_like=True):
    """As the row of the item. `payload` is None when it is too large to be kept twice: PostgreSQL has it."""

    id: int
    topic_id: int
    priority: int
    deliver_after: datetime
    retries: int
    created_at: datetime
    updated_at: datetime
    first_failed_at: datetime | None
    last_error: str | None
    expires_at: datetime | None
    idempotency_key: str | None
    is_json: bool
    metadata: bytes | None
    payload: bytes | None
    leased_until: datetime | None = None
    lease_owner: str | None = None

    def __getitem__(self, column: str) -> Any:
        return getattr(self, column)

    @property
    def place(self) -> tuple[int, datetime, int]:
        """Its place in the order of service."""
        return self.priority, self.deliver_after, self.id
