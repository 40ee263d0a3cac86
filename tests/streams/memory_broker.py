"""A server in memory, as far as a stream needs one: state with versions, pushes, and acks that happen once."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from queen.streams import PopRequest
from queen.streams.records import Message


class MemoryBroker:
    """Keeps everything in plain dictionaries; `pushed` is what arrived in sinks, in order."""

    def __init__(self) -> None:
        self.state: dict[tuple[str, str], tuple[Any, int]] = {}
        self.pushed: list[dict[str, Any]] = []
        self.acked: defaultdict[str, int] = defaultdict(int)
        self.cycles: list[Mapping[str, Any]] = []
        self.hashes: dict[str, str] = {}
        self._versions = itertools.count(1)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        if path == "/streams/v1/queries":
            self.hashes[body["name"]] = body["config_hash"]
            return {"success": True, "query_id": body["name"], "fresh": True, "reset": False}
        if path == "/streams/v1/state/get":
            return {"success": True, "rows": self._read(body)}
        assert path == "/streams/v1/cycle", path
        return self._cycle(body)

    async def pop(self, queue: str, request: PopRequest) -> list[Message]:
        return []

    async def close(self) -> None:
        return

    def values(self, partition_id: str) -> dict[str, Any]:
        """The state of a partition."""
        return {key: value for (place, key), (value, _) in self.state.items() if place == partition_id}

    def _read(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        rows = []
        for (partition_id, key), (value, version) in sorted(self.state.items(), key=lambda item: item[0]):
            if partition_id != body["partition_id"] or (body.get("keys") and key not in body["keys"]):
                continue
            ripe = body.get("ripe_at_or_before")
            if not key.startswith(body.get("key_prefix") or "") or (ripe is not None and not _ended(value, ripe)):
                continue
            rows.append({"key": key, "value": value, "version": version})
        return rows

    def _cycle(self, body: Mapping[str, Any]) -> dict[str, Any]:
        partition_id = body["partition_id"]
        for change in body["state_ops"]:
            _, version = self.state.get((partition_id, change["key"]), (None, None))
            if change["if_version"] != version:
                return {"success": False, "error": f"State changed since it was read: {change['key']}"}
        for change in body["state_ops"]:
            place = (partition_id, change["key"])
            if change["type"] == "delete":
                del self.state[place]
            else:
                self.state[place] = (change["value"], next(self._versions))
        self.pushed += body["push_items"]
        if body["ack"]:
            self.acked[partition_id] += body["ack"]["count"]
        self.cycles.append(body)
        return {"success": True}


def _ended(value: Any, ripe: float) -> bool:
    return isinstance(value, dict) and "windowEnd" in value and value["windowEnd"] <= ripe
