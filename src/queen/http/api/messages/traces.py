"""Traces: recording events of a message, and reading them."""

from __future__ import annotations

from typing import Any

import msgspec

from queen.broker.inspect.traces import Trace
from queen.errors import BadRequest, NotFound
from queen.http.auth import names
from queen.http.routing.call import Call, Reply
from queen.http.routing.context import Shard
from queen.http.routing.placement import Paged, by_partition
from queen.http.routing.route import DATABASE, FOUND, RouteTable
from queen.http.server.message import Access
from queen.log.catalog import QUEUE_MODE
from queen.storage.database import can_be_stored
from queen.wire.api.messages.traces import (
    NamedTraceList,
    NamedTracesQuery,
    TraceList,
    TraceNameList,
    TraceNamesQuery,
    TraceRequest,
    TraceStored,
)
from queen.wire.decode import decode_fields
from queen.wire.fields import Error, Page
from queen.wire.push import LONGEST_NAME, check_utf8

routes = RouteTable("Traces")

_MOST_NAMES = 50


class _Data(msgspec.Struct):
    """The one field of a trace that is kept as the bytes it came as."""

    data: msgspec.Raw = msgspec.Raw()


_decode_data = msgspec.json.Decoder(_Data).decode


def decode_trace(body: bytes) -> Trace:
    """The body of a trace; raises `BadRequest` that says what is wrong with it."""
    check_utf8(body)
    value = decode_fields(body, TraceRequest)
    transaction_id, partition_id = value.get("transactionId"), value.get("partitionId")
    if (
        not isinstance(transaction_id, str)
        or not isinstance(partition_id, str)
        or not (transaction_id and partition_id)
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


@routes.on_shard(
    "POST",
    "/api/v1/traces",
    access=Access.READ_WRITE,
    names=names.traced,
    placement=by_partition("partition_id"),
    summary="Record a trace event of a message",
    body=TraceRequest,
    decode=decode_trace,
    body_example={
        "transactionId": "order-1",
        "partitionId": "00000000-0000-8000-8000-000000000001",
        "data": {"text": "charged the card"},
        "traceNames": ["customer-7"],
    },
    returns={201: TraceStored},
    errors=FOUND,
)
async def add_trace(shard: Shard, call: Call[None, Trace]) -> TraceStored | Reply:
    try:
        return TraceStored(True, await shard.broker.traces.add(call.body))
    except NotFound as error:
        return Reply(404, Error(str(error), success=False))


@routes.on_shard(
    "GET",
    "/api/v1/traces/names",
    access=Access.READ_ONLY,
    placement=Paged("trace_names", lambda one: one.last_seen),
    summary="List trace names",
    query=TraceNamesQuery,
    returns={200: TraceNameList},
    errors=DATABASE,
)
async def trace_names(shard: Shard, call: Call[TraceNamesQuery, None]) -> TraceNameList:
    return await shard.broker.traces.names(call.query.search, call.query.limit, call.query.offset)


@routes.on_shard(
    "GET",
    "/api/v1/traces/by-name/{name}",
    access=Access.READ_ONLY,
    placement=Paged("traces", lambda one: one.created_at, newest_first=False),
    summary="List the traces of a name",
    query=NamedTracesQuery,
    returns={200: NamedTraceList},
    errors=DATABASE,
)
async def traces_by_name(shard: Shard, call: Call[NamedTracesQuery, None]) -> NamedTraceList:
    return await shard.broker.traces.by_name(call.params["name"], call.query.limit, call.query.offset)


@routes.on_shard(
    "GET",
    "/api/v1/traces/{partition}/{transaction}",
    access=Access.READ_ONLY,
    placement=by_partition(),
    summary="List the traces of a message",
    query=Page,
    returns={200: TraceList},
    errors=DATABASE,
)
async def traces_of_message(shard: Shard, call: Call[Page, None]) -> TraceList:
    partition, transaction = call.params["partition"], call.params["transaction"]
    return await shard.broker.traces.of_message(partition, transaction, call.query.limit, call.query.offset)


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
