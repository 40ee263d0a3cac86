"""Requests of a query: register, read state, commit cycles."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from queen.streams.broker import Broker
from queen.streams.errors import (
    StateChanged,
    StreamsConfigHashMismatch,
    StreamsCycleFailed,
    StreamsHttpError,
    StreamsRegisterFailed,
    StreamsStateGetFailed,
)
from queen.streams.records import Row, Rows

_STATE_CHANGED = "State changed"
_PAGE = 2000


@dataclass(frozen=True, slots=True)
class Registration:
    """Result of a registration; `partitions` maps the ids of partitions with state to their names."""

    id: str
    fresh: bool
    reset: bool
    partitions: Mapping[str, str] = field(default_factory=dict)


async def register(
    broker: Broker, name: str, source_queue: str, sink_queue: str | None, config_hash: str, *, reset: bool
) -> Registration:
    """Register a query. Raises `StreamsConfigHashMismatch` if it exists with other operators, unless `reset`."""
    body: dict[str, Any] = {
        "name": name,
        "source_queue": source_queue,
        "config_hash": config_hash,
        "reset": reset,
    }
    if sink_queue:
        body["sink_queue"] = sink_queue
    try:
        response = await broker.post("/streams/v1/queries", body)
    except StreamsHttpError as error:
        if error.status == 409:
            raise StreamsConfigHashMismatch(
                f"{error} (use run(reset=True) to delete the old state, or another query_id to keep it)"
            ) from error
        raise
    if not isinstance(response, dict) or response.get("success") is False:
        raise StreamsRegisterFailed(_error_of(response, "the query could not be registered"))
    known = response.get("partitions")
    partitions = {one["partition_id"]: one["partition"] for one in known} if isinstance(known, list) else {}
    return Registration(
        str(response.get("query_id")), bool(response.get("fresh")), bool(response.get("reset")), partitions
    )


class Query:
    """A registered query."""

    def __init__(self, broker: Broker, id: str, config_hash: str) -> None:
        self._broker = broker
        self.id = id
        self._config_hash = config_hash

    async def read_keys(self, partition_id: str, keys: Collection[str]) -> Rows:
        """The state of some keys."""
        if not keys:
            return {}
        return _rows(await self._get(partition_id, {"keys": sorted(keys)}))

    async def read_prefix(self, partition_id: str, prefix: str, ripe_at: int | None = None) -> Rows:
        """The state of keys with a prefix, optionally only of windows ended by `ripe_at`; read in pages."""
        rows: Rows = {}
        request: dict[str, Any] = {"keys": [], "key_prefix": prefix, "limit": _PAGE}
        if ripe_at is not None:
            request["ripe_at_or_before"] = ripe_at
        while True:
            response = await self._get(partition_id, request)
            page = _rows(response)
            rows |= page
            if not page or response.get("more") is not True:
                return rows
            request["after"] = max(page)

    async def commit(
        self,
        partition_id: str,
        group: str,
        *,
        changes: Sequence[Mapping[str, Any]],
        items: Sequence[Mapping[str, Any]],
        ack: Mapping[str, Any] | None,
        release: bool = True,
    ) -> None:
        """Commit state, pushes and ack atomically. Raises `StateChanged` on a concurrent change of the state."""
        body = {
            "query_id": self.id,
            "partition_id": partition_id,
            "consumer_group": group,
            "config_hash": self._config_hash,
            "state_ops": changes,
            "push_items": items,
            "ack": ack,
            "release_lease": release,
        }
        response = await self._broker.post("/streams/v1/cycle", body)
        if isinstance(response, dict) and response.get("success") is not False:
            return
        message = _error_of(response, "the cycle could not be committed")
        raise (StateChanged if message.startswith(_STATE_CHANGED) else StreamsCycleFailed)(message, response)

    async def _get(self, partition_id: str, request: Mapping[str, Any]) -> dict[str, Any]:
        body = {"query_id": self.id, "partition_id": partition_id, **request}
        response = await self._broker.post("/streams/v1/state/get", body)
        if not isinstance(response, dict) or response.get("success") is False:
            raise StreamsStateGetFailed(_error_of(response, "state could not be read"))
        return response


def _rows(response: Mapping[str, Any]) -> Rows:
    return {row["key"]: Row(row.get("value"), row.get("version")) for row in response.get("rows") or []}


def _error_of(response: Any, default: str) -> str:
    message = response.get("error") if isinstance(response, dict) else None
    return str(message or default)
