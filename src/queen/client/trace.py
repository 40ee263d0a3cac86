"""`message["trace"]`: events in the life of a message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from queen.client.config import ClientLog
from queen.client.errors import QueenError
from queen.client.http import HttpClient
from queen.client.types import QUEUE_MODE, Message, TraceConfig

_NEEDS_DATA = "Invalid trace config: requires { data: {...} }"


class Tracer:
    """Records traces for the messages of one consumer."""

    def __init__(self, http: HttpClient, log: ClientLog, group: str | None) -> None:
        self._http = http
        self._log = log
        self._group = group or QUEUE_MODE

    def attach(self, messages: list[Message]) -> None:
        """Give each message its `trace`."""
        for message in messages:
            message["trace"] = MessageTrace(self, message["transactionId"], message["partitionId"])

    async def record(self, transaction_id: str, partition_id: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Record one event. A trace that fails never fails the handler: the answer and the log say so."""
        if not isinstance(config, Mapping) or "data" not in config:
            self._log.warning("Message.trace", _NEEDS_DATA, transaction_id=transaction_id)
            return {"success": False, "error": _NEEDS_DATA}
        body = {
            "transactionId": transaction_id,
            "partitionId": partition_id,
            "consumerGroup": self._group,
            "traceNames": _names(config.get("traceName")),
            "eventType": config.get("eventType") or "info",
            "data": config["data"],
        }
        try:
            answer = await self._http.request("POST", "/api/v1/traces", body)
        except (QueenError, TypeError, ValueError) as error:
            self._log.warning("Message.trace", f"not recorded: {error}", transaction_id=transaction_id)
            return {"success": False, "error": str(error)}
        return {"success": True, **(answer or {})}


# One is made for every message: a struct the garbage collector need not look at costs half of a closure.
class MessageTrace(msgspec.Struct, gc=False):
    """What stands under `message["trace"]`: records events of this message."""

    tracer: Tracer
    transaction_id: str
    partition_id: str

    async def __call__(self, config: TraceConfig, /) -> dict[str, Any]:
        return await self.tracer.record(self.transaction_id, self.partition_id, config)


def _names(given: object) -> list[str] | None:
    names = [given] if isinstance(given, str) else given if isinstance(given, list | tuple) else []
    return [name for name in names if isinstance(name, str) and name] or None
