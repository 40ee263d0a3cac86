"""Spans of the requests that move messages, along OpenTelemetry's conventions for messaging.

A span is the server's side of the operation; the `traceparent` that came with the request is its parent.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from queen.http.message import Request, Response
from queen.http.router import Route
from queen.http.span_attributes import (
    DESTINATION,
    Attributes,
    Describe,
    describe_ack,
    describe_pop,
    describe_push,
    describe_transaction,
)
from queen.http.watching import Begin, Ended, status_in

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
