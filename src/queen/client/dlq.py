"""Queries for dead letters."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlencode

from queen.client.errors import QueenError
from queen.client.http import HttpClient
from queen.client.log import ClientLog
from queen.client.messages import DEFAULT_PARTITION, DLQResponse


class DlqOptions:
    """Which dead letters to get: of one queue, narrowed down by group, partition and time of failure."""

    def __init__(self, http: HttpClient, log: ClientLog, strict: bool, queue: str, group: str | None, partition: str):
        self._http = http
        self._log = log
        self._strict = strict
        self._parameters: dict[str, str | int] = {"queue": queue, "limit": 100, "offset": 0}
        if group:
            self._parameters["consumerGroup"] = group
        if partition != DEFAULT_PARTITION:
            self._parameters["partition"] = partition

    def limit(self, count: int) -> Self:
        """At most so many."""
        self._parameters["limit"] = max(1, count)
        return self

    def offset(self, count: int) -> Self:
        """Leave out the first."""
        self._parameters["offset"] = max(0, count)
        return self

    def from_(self, timestamp: str) -> Self:
        """Those that failed at this time (ISO 8601) or later."""
        self._parameters["from"] = timestamp
        return self

    def to(self, timestamp: str) -> Self:
        """Those that failed at this time (ISO 8601) or before."""
        self._parameters["to"] = timestamp
        return self

    async def _get(self) -> DLQResponse:
        try:
            answer = await self._http.request("GET", f"/api/v1/dlq?{urlencode(self._parameters)}")
        except QueenError as error:
            if self._strict:
                raise
            self._log.warning("DlqQuery.get", f"the dead letters cannot be read: {error}")
            answer = None
        nothing: DLQResponse = {"messages": [], "total": 0}
        found: DLQResponse = nothing if answer is None else answer
        return found


class DlqQuery(DlqOptions):
    """`queue(...).dlq()`: a query, and `get()` makes it."""

    async def get(self) -> DLQResponse:
        """The dead letters, the latest first; empty (and a warning) on failure, unless the client is strict."""
        return await self._get()
