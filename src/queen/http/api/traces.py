"""Traces: saying something about a message, and reading what was said."""

from __future__ import annotations

from typing import Any

import msgspec

from queen.broker.broker import Broker
from queen.broker.catalog import QUEUE_MODE
from queen.broker.inspect.traces import Trace
from queen.errors import BadRequest, NotFound
from queen.http.api.params import MOST_ON_A_PAGE, read_page
from queen.http.server.message import Request, Response, json_response
from queen.http.server.router import Access, Router
from queen.storage.database import can_be_stored
from queen.wire.ack import decode_object
from queen.wire.push import LONGEST_NAME, check_utf8

_BY_NAME = 100
_NAMES = 50
_MOST_NAMES = 50


class _Data(msgspec.Struct):
    """The one field of a trace that is kept as the bytes it came as."""

    data: msgspec.Raw = msgspec.Raw()


_decode_data = msgspec.json.Decoder(_Data).decode


class TraceRoutes:
    """Writing and reading traces."""

    def __init__(self, broker: Broker) -> None:
        self._traces = broker.traces

    def add_to(self, router: Router) -> None:
        router.add("POST", "/api/v1/traces", self.add, Access.READ_WRITE)
        router.add("GET", "/api/v1/traces/names", self.names, Access.READ_ONLY)
        router.add("GET", "/api/v1/traces/by-name/{name}", self.by_name, Access.READ_ONLY)
        router.add("GET", "/api/v1/traces/{partition}/{transaction}", self.of_message, Access.READ_ONLY)

    async def add(self, request: Request) -> Response:
        trace = read_trace(request.body)
        try:
            trace_id = await self._traces.add(trace)
        except NotFound as error:
            return json_response(404, {"success": False, "error": str(error)})
        return json_response(201, {"success": True, "traceId": trace_id})

    async def of_message(self, request: Request) -> Response:
        limit, offset = read_page(request, MOST_ON_A_PAGE)
        partition, transaction = request.params["partition"], request.params["transaction"]
        return json_response(200, await self._traces.of_message(partition, transaction, limit, offset))

    async def by_name(self, request: Request) -> Response:
        limit, offset = read_page(request, _BY_NAME)
        return json_response(200, await self._traces.by_name(request.params["name"], limit, offset))

    async def names(self, request: Request) -> Response:
        limit, offset = read_page(request, _NAMES)
        return json_response(200, await self._traces.names(limit, offset))


def read_trace(body: bytes) -> Trace:
    """The body of a trace; raises `BadRequest` that says what is wrong with it."""
    check_utf8(body)
    value = decode_object(body)
    transaction_id, partition_id = value.get("transactionId"), value.get("partitionId")
    if (
        not isinstance(transaction_id, str)
        or not isinstance(partition_id, str)
        or not transaction_id
        or not partition_id
    ):
        raise BadRequest("transactionId and partitionId are required")
    if "data" not in value:
        raise BadRequest("data is required")
    return Trace(
        partition_id=partition_id,
        transaction_id=transaction_id,
        data=bytes(_decode_data(body).data),
        group=_name(value, "consumerGroup", QUEUE_MODE),
        event_type=_name(value, "eventType", "info"),
        names=_names(value.get("traceNames")),
    )


def _name(value: dict[str, Any], key: str, default: str) -> str:
    """A short text; `null` and `""` count as absent."""
    found = value.get(key)
    if found is None or found == "":
        return default
    return _checked(found, key)


def _names(value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return [_checked(value, "traceNames")]
    if not isinstance(value, list):
        raise BadRequest("traceNames must be a string or an array of strings")
    names = list(dict.fromkeys(_checked(name, f"traceNames[{index}]") for index, name in enumerate(value)))
    if len(names) > _MOST_NAMES:
        raise BadRequest(f"traceNames must be at most {_MOST_NAMES} names, not {len(names)}")
    return names


def _checked(text: object, where: str) -> str:
    if not isinstance(text, str) or not text:
        raise BadRequest(f"{where} must be a string that is not empty")
    if len(text) > LONGEST_NAME:
        raise BadRequest(f"{where} must be at most {LONGEST_NAME} characters, not {len(text)}")
    if not can_be_stored(text):
        raise BadRequest(f"{where} must not contain a NUL character")
    return text
