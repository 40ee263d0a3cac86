"""A query as the server knows it: registering it, reading its state, committing its cycles."""

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
    """What the server said to a registration; `partitions` have state, by their ids, with their names."""

    id: str
    fresh: bool
    reset: bool
    partitions: Mapping[str, str] = field(default_factory=dict)


async def register(
    broker: Broker, name: str, source_queue: str, sink_queue: str | None, config_hash: str, *, reset: bool
) -> Registration:
    """Raises `StreamsConfigHashMismatch` when the query is registered with other operators and is not to be reset."""
    body: dict[str, Any] = {
        "name": name,
        "source_queue": source_queue,
        "config_hash": config_hash,
        "reset": reset,
    }
    if sink_queue:
        body["sink_queue"] = sink_queue
    try:
        answer = await broker.post("/streams/v1/queries", body)
    except StreamsHttpError as error:
        if error.status == 409:
            raise StreamsConfigHashMismatch(
                f"{error} (run(reset=True) drops the old state; another query_id keeps it)"
            ) from error
        raise
    if not isinstance(answer, dict) or answer.get("success") is False:
        raise StreamsRegisterFailed(_said(answer, "the query could not be registered"))
    known = answer.get("partitions")
    partitions = {one["partition_id"]: one["partition"] for one in known} if isinstance(known, list) else {}
    return Registration(str(answer.get("query_id")), bool(answer.get("fresh")), bool(answer.get("reset")), partitions)


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
        """The state whose key begins so, all or that of windows which have ended by then; page by page."""
        rows: Rows = {}
        asked: dict[str, Any] = {"keys": [], "key_prefix": prefix, "limit": _PAGE}
        if ripe_at is not None:
            asked["ripe_at_or_before"] = ripe_at
        while True:
            answer = await self._get(partition_id, asked)
            page = _rows(answer)
            rows |= page
            if not page or answer.get("more") is not True:
                return rows
            asked["after"] = max(page)

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
        """State, pushes and ack as one. Raises `StateChanged` when the state is not as it was read any more."""
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
        answer = await self._broker.post("/streams/v1/cycle", body)
        if isinstance(answer, dict) and answer.get("success") is not False:
            return
        said = _said(answer, "the cycle could not be committed")
        raise (StateChanged if said.startswith(_STATE_CHANGED) else StreamsCycleFailed)(said, answer)

    async def _get(self, partition_id: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        body = {"query_id": self.id, "partition_id": partition_id, **asked}
        answer = await self._broker.post("/streams/v1/state/get", body)
        if not isinstance(answer, dict) or answer.get("success") is False:
            raise StreamsStateGetFailed(_said(answer, "state could not be read"))
        return answer


def _rows(answer: Mapping[str, Any]) -> Rows:
    return {row["key"]: Row(row.get("value"), row.get("version")) for row in answer.get("rows") or []}


def _said(answer: Any, otherwise: str) -> str:
    said = answer.get("error") if isinstance(answer, dict) else None
    return str(said or otherwise)
