"""Spans of the requests that move messages, along OpenTelemetry's conventions for messaging.

A span is the server's side of the operation; the `traceparent` that came with the request is its parent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from queen.http.server.message import Request, Response, Route
from queen.http.server.observe import Begin, Ended, status_in
from queen.log.catalog import QUEUE_MODE
from queen.wire.push import DEFAULT_PARTITION

Attributes: TypeAlias = dict[str, str | int | bool]
Describe: TypeAlias = Callable[[Request, Response | None], Attributes]

DESTINATION: Final = "messaging.destination.name"
PARTITION: Final = "messaging.destination.partition.id"
COUNT: Final = "messaging.batch.message_count"
GROUP: Final = "messaging.consumer.group.name"
MESSAGE: Final = "messaging.message.id"
TRANSACTION: Final = "queen.transaction_id"
COMMITTED: Final = "queen.transaction.committed"


class _Pushed(msgspec.Struct):
    queue: str
    partition: str = DEFAULT_PARTITION


class _Push(msgspec.Struct):
    items: list[_Pushed]


class _Stored(msgspec.Struct):
    transaction_id: str = ""
    message_id: str = ""


class _Message(msgspec.Struct):
    id: str
    transaction_id: str = msgspec.field(name="transactionId")
    partition: str


class _Popped(msgspec.Struct):
    queue: str
    messages: list[_Message]


class _Ack(msgspec.Struct):
    transaction_id: str = msgspec.field(default="", name="transactionId")
    consumer_group: str | None = msgspec.field(default=None, name="consumerGroup")
    acknowledgments: list[_Ack] | None = None


class _Acked(msgspec.Struct):
    queue: str | None = msgspec.field(default=None, name="queueName")
    partition: str | None = msgspec.field(default=None, name="partitionName")


class _Step(msgspec.Struct):
    type: str
    items: list[_Pushed] | None = None


class _Transaction(msgspec.Struct):
    operations: list[_Step]


class _Outcome(msgspec.Struct):
    success: bool


_push = msgspec.json.Decoder(_Push)
_stored = msgspec.json.Decoder(list[_Stored])
_popped = msgspec.json.Decoder(_Popped)
_ack = msgspec.json.Decoder(_Ack)
_acked = msgspec.json.Decoder(list[_Acked])
_transaction = msgspec.json.Decoder(_Transaction)
_outcome = msgspec.json.Decoder(_Outcome)


def describe_push(request: Request, response: Response | None) -> Attributes:
    items = _push.decode(request.body).items
    found = _destination((item.queue, item.partition) for item in items)
    found[COUNT] = len(items)
    if len(items) == 1 and response is not None:
        (stored,) = _stored.decode(response.body)
        found |= {MESSAGE: stored.message_id, TRANSACTION: stored.transaction_id}
    return found


def describe_pop(request: Request, response: Response | None) -> Attributes:
    found: Attributes = {GROUP: request.query.get("consumerGroup") or QUEUE_MODE}
    if "queue" in request.params:
        found[DESTINATION] = request.params["queue"]
    if "partition" in request.params:
        found[PARTITION] = request.params["partition"]
    if response is None:
        return found
    if not response.body:
        return found | {COUNT: 0}
    popped = _popped.decode(response.body)
    found |= {COUNT: len(popped.messages), DESTINATION: popped.queue}
    partitions = {message.partition for message in popped.messages}
    if len(partitions) == 1:
        found[PARTITION] = partitions.pop()
    if len(popped.messages) == 1:
        found |= {MESSAGE: popped.messages[0].id, TRANSACTION: popped.messages[0].transaction_id}
    return found


def describe_ack(request: Request, response: Response | None) -> Attributes:
    sent = _ack.decode(request.body)
    acks = [sent] if sent.acknowledgments is None else sent.acknowledgments
    found: Attributes = {COUNT: len(acks), GROUP: sent.consumer_group or QUEUE_MODE}
    if len(acks) == 1:
        found[TRANSACTION] = acks[0].transaction_id
    if response is not None:
        found |= _destination(
            (result.queue, result.partition)
            for result in _acked.decode(response.body)
            if result.queue is not None and result.partition is not None
        )
    return found


def describe_transaction(request: Request, response: Response | None) -> Attributes:
    operations = _transaction.decode(request.body).operations
    pushes = [item for operation in operations for item in operation.items or ()]
    acks = sum(operation.type == "ack" for operation in operations)
    found: Attributes = {COUNT: len(pushes) + acks}
    if response is not None:
        found[COMMITTED] = _outcome.decode(response.body).success
    return found | _destination((item.queue, item.partition) for item in pushes)


def _destination(places: Iterable[tuple[str, str]]) -> Attributes:
    """The queue and the partition, each where it is the same for all."""
    found = set(places)
    queues, partitions = {queue for queue, _ in found}, {partition for _, partition in found}
    attributes: Attributes = {DESTINATION: queues.pop()} if len(queues) == 1 else {}
    return attributes | {PARTITION: partitions.pop()} if attributes and len(partitions) == 1 else attributes


log = logging.getLogger(__name__)

_CONTEXT_HEADERS: Final = ("traceparent", "tracestate")


@dataclass(frozen=True, slots=True)
class Operation:
    """What the conventions call an operation; `type` is one of theirs, or nothing where they have none."""

    name: str
    type: str | None
    describe: Describe


_PUSH: Final = Operation("push", "send", describe_push)
_POP: Final = Operation("pop", "receive", describe_pop)
_ACK: Final = Operation("ack", "settle", describe_ack)
_TRANSACTION: Final = Operation("transaction", None, describe_transaction)
_OPERATIONS: Final = {
    "/api/v1/push": _PUSH,
    "/api/v1/pop": _POP,
    "/api/v1/pop/queue/{queue}": _POP,
    "/api/v1/pop/queue/{queue}/partition/{partition}": _POP,
    "/api/v1/ack": _ACK,
    "/api/v1/ack/batch": _ACK,
    "/api/v1/transaction": _TRANSACTION,
}


class Tracing:
    """Makes the spans of one worker."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    def watching(self, route: Route) -> Begin | None:
        """Who makes the spans of a route; None for a route that moves no messages."""
        operation = _OPERATIONS.get(route.pattern)
        if operation is None:
            return None
        fixed: Attributes = {
            "messaging.system": "queen",
            "messaging.operation.name": operation.name,
            "http.request.method": route.method,
            "http.route": route.pattern,
        }
        if operation.type is not None:
            fixed["messaging.operation.type"] = operation.type

        def begin(request: Request) -> Ended | None:
            span = self._tracer.start_span(
                operation.name, self._parent(request), kind=SpanKind.SERVER, attributes=fixed
            )
            if not span.is_recording():
                return None

            def ended(response: Response | None, error: BaseException | None) -> None:
                try:
                    _finish(span, operation, request, response, error)
                finally:
                    span.end()

            return ended

        return begin

    def _parent(self, request: Request) -> Context:
        sent = {
            name: value.decode("latin-1")
            for name in _CONTEXT_HEADERS
            if (value := request.headers.get(name.encode())) is not None
        }
        # An empty context, not the current one: requests are not nested in each other.
        return self._propagator.extract(sent, Context())


def _finish(
    span: Span, operation: Operation, request: Request, response: Response | None, error: BaseException | None
) -> None:
    status = status_in(response, error)
    found = _describe(operation, request, response)
    span.set_attributes(found)
    span.set_attribute("http.response.status_code", status)
    if DESTINATION in found:
        span.update_name(f"{operation.name} {found[DESTINATION]}")
    if error is not None:
        _note_error(span, status, error)


def _describe(operation: Operation, request: Request, response: Response | None) -> Attributes:
    try:
        return operation.describe(request, response)
    except (msgspec.DecodeError, RecursionError):
        # A body that cannot be read was refused, and the error says why.
        return {}
    except Exception:
        # A span that says too little must not cost the client its answer.
        log.exception("the span of %s %s is incomplete", request.method, request.path)
        return {}


def _note_error(span: Span, status: int, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__name__)
    if isinstance(error, asyncio.CancelledError):
        # The client has gone; nothing failed here.
        return
    if isinstance(error, Exception):
        span.record_exception(error)
    # As with any server's span, what the client did wrong is no error of the server.
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR, str(error)))
