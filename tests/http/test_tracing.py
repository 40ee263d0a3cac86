"""Spans: what they say, whose children they are, where they are sent, and that without them nothing is paid."""

from __future__ import annotations

import gzip
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from queen.errors import SettingsError
from queen.http.api.messages import messaging
from queen.http.tracing import Tracing
from queen.server.worker import Worker
from queen.settings import Settings
from queen.telemetry import span_exporters
from tests.cli.serve.test_serve import queen, started
from tests.support.api import Api
from tests.support.ports import free_port
from tests.support.proxy import Proxy

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Traced:
    """A server that makes spans, and the spans it made."""

    def __init__(self, api: Api, proxy: Proxy, exporter: InMemorySpanExporter) -> None:
        self.api = api
        self.proxy = proxy
        self._exporter = exporter

    def spans(self) -> list[ReadableSpan]:
        found = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return found

    def one(self) -> tuple[str, dict[str, Any], ReadableSpan]:
        """The name, the attributes and the whole of the only span since the last time."""
        (span,) = self.spans()
        return span.name, dict(span.attributes or {}), span


@pytest.fixture
async def traced(proxy: Proxy, tmp_path: Path) -> AsyncIterator[Traced]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings = Settings.from_env({}, num_workers=1, host="127.0.0.1", database_urls=(proxy.dsn,))
    worker = Worker(settings, 0, tmp_path, port=0, tracing=Tracing(provider.get_tracer("test")))
    await worker.start()
    api = Api(f"http://127.0.0.1:{worker.port}", worker)
    yield Traced(api, proxy, exporter)
    await api.close()
    await worker.stop()


async def test_a_push_of_one_message_is_a_send_span_with_its_id(traced: Traced) -> None:
    (result,) = await traced.api.push("orders", 1, partition="eu", ids=["t-1"])
    name, attributes, span = traced.one()
    assert (name, span.kind, span.parent) == ("push orders", SpanKind.SERVER, None)
    assert attributes == {
        "messaging.system": "queen",
        "messaging.operation.name": "push",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "eu",
        "messaging.batch.message_count": 1,
        "messaging.message.id": result["message_id"],
        "queen.transaction_id": "t-1",
        "http.request.method": "POST",
        "http.route": "/api/v1/push",
        "http.response.status_code": 201,
    }


async def test_a_push_to_several_queues_names_none(traced: Traced) -> None:
    items = [{"queue": queue, "payload": 1} for queue in ("orders", "invoices")]
    await traced.api.call("POST", "/api/v1/push", {"items": items})
    name, attributes, _ = traced.one()
    assert (name, attributes["messaging.batch.message_count"]) == ("push", 2)
    assert not attributes.keys() & {"messaging.destination.name", "messaging.message.id"}


async def test_pops_are_receive_spans_also_when_they_are_empty(traced: Traced) -> None:
    await traced.api.push("orders", 1, 2)
    traced.spans()
    (message,) = await traced.api.pop("orders", consumerGroup="workers")
    name, attributes, _ = traced.one()
    assert (name, attributes["messaging.operation.type"]) == ("pop orders", "receive")
    assert attributes["messaging.consumer.group.name"] == "workers"
    assert attributes["messaging.destination.partition.id"] == "Default"
    assert attributes["messaging.message.id"] == message["id"]
    assert len(await traced.api.pop("orders", "Default", batch=5)) == 2
    _, attributes, _ = traced.one()
    assert (attributes["messaging.batch.message_count"], attributes["messaging.consumer.group.name"]) == (
        2,
        "__QUEUE_MODE__",
    )
    assert await traced.api.pop("nothing") == []
    name, attributes, _ = traced.one()
    assert (name, attributes["messaging.batch.message_count"]) == ("pop nothing", 0)
    await traced.api.call("GET", "/api/v1/pop", namespace="nobody")
    name, attributes, _ = traced.one()
    assert (name, attributes["http.response.status_code"]) == ("pop", 204)


async def test_acks_are_settle_spans_and_transactions_have_their_own(traced: Traced) -> None:
    await traced.api.push("orders", 1, 2, ids=["a", "b"])
    messages = await traced.api.pop("orders", batch=2, consumerGroup="workers")
    traced.spans()
    await traced.api.ack(messages, group="workers")
    name, attributes, _ = traced.one()
    assert (name, attributes["messaging.operation.type"]) == ("ack orders", "settle")
    assert (attributes["messaging.batch.message_count"], attributes["messaging.consumer.group.name"]) == (2, "workers")
    single = {"transactionId": "a", "partitionId": messages[0]["partitionId"]}
    await traced.api.call("POST", "/api/v1/ack", single)
    name, attributes, _ = traced.one()
    assert (name, attributes["queen.transaction_id"]) == ("ack orders", "a")
    operations = [{"type": "push", "items": [{"queue": "next", "payload": 1}]}, {"type": "ack", **single}]
    await traced.api.call("POST", "/api/v1/transaction", {"operations": operations})
    name, attributes, _ = traced.one()
    assert (name, attributes["messaging.batch.message_count"]) == ("transaction next", 2)
    assert attributes["queen.transaction.committed"] is True
    assert "messaging.operation.type" not in attributes


async def test_the_traceparent_of_the_request_is_the_parent(traced: Traced) -> None:
    async with aiohttp.ClientSession(headers={"traceparent": TRACEPARENT, "tracestate": "a=b"}) as session:
        url = f"{traced.api.url}/api/v1/pop/queue/orders"
        async with session.get(url):
            pass
        _, _, span = traced.one()
        assert span.parent is not None and span.parent.is_remote
        assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
        async with session.get(url, headers={"traceparent": "nonsense"}):
            pass
        _, _, span = traced.one()
        assert span.parent is None


async def test_a_client_that_does_not_sample_gets_no_span(traced: Traced) -> None:
    async with (
        aiohttp.ClientSession(headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}) as session,
        session.get(f"{traced.api.url}/api/v1/pop/queue/orders") as answer,
    ):
        assert answer.status == 204
    assert traced.spans() == []


async def test_a_failure_of_the_server_is_an_error_of_its_span(traced: Traced) -> None:
    async with traced.proxy.away():
        answer = await traced.api.call("GET", "/api/v1/pop/queue/orders")
    assert answer.status == 503
    name, attributes, span = traced.one()
    assert (name, attributes["error.type"], span.status.status_code) == (
        "pop orders",
        "DatabaseUnavailable",
        StatusCode.ERROR,
    )
    assert [event.name for event in span.events] == ["exception"]


async def test_a_mistake_of_the_client_is_recorded_but_no_error_of_the_server(traced: Traced) -> None:
    for body in (b"", b"{", b'{"items":[{"queue":7}]}', b"[" * 100_000):
        assert (await traced.api.call("POST", "/api/v1/push", data=body)).status == 400
        _, attributes, span = traced.one()
        assert (attributes["error.type"], attributes["http.response.status_code"]) == ("BadRequest", 400)
        assert span.status.status_code is StatusCode.UNSET


async def test_other_routes_make_no_spans(traced: Traced) -> None:
    await traced.api.call("GET", "/api/v1/resources/queues")
    await traced.api.call("GET", "/health")
    assert traced.spans() == []


async def test_without_an_exporter_handlers_serve_as_if_there_were_no_spans(api: Api) -> None:
    assert api.worker is not None
    handlers = {route.pattern: route.handler for route in api.worker.http.router.routes}
    for pattern, declared in (("/api/v1/ack", messaging.ack), ("/api/v1/ack/batch", messaging.ack_batch)):
        handler = handlers[pattern]
        assert isinstance(handler, partial)
        assert handler.func is declared


class Collector(ThreadingHTTPServer):
    """Takes what an OTLP exporter sends over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.received: list[ExportTraceServiceRequest] = []
        self.arrived = threading.Event()


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:  # the name is that of the HTTP method
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.server.arrived.set()

    def log_message(self, format: str, *args: object) -> None:
        """A test has no use for an access log."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


async def one_push(dsn: str) -> list[str]:
    """Start a server, push one message, stop it; returns what it wrote."""
    port = free_port()
    options = ("--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--database-url", dsn)
    async with started(*queen("serve", *options)) as served:
        await served.line_with("is ready at")
        api = Api(f"http://127.0.0.1:{port}")
        await api.push("orders", 1)
        await api.close()
        served.process.send_signal(signal.SIGTERM)
        assert await served.ended() == 0
    return served.lines


async def test_spans_reach_a_collector_over_otlp(
    collector: Collector, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_address[1]}")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    # Spans are sent in batches every few seconds, and what is left at the end.
    await one_push(dsn)
    assert collector.arrived.is_set()
    (resource,) = collector.received[0].resource_spans
    about = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert (about["service.name"], about["deployment.environment.name"]) == ("queen", "test")
    assert about["service.instance.id"].endswith("/0")
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["push orders"]


async def test_a_collector_that_is_away_does_not_keep_the_server_from_ending(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert not any("killing it" in line for line in await one_push(dsn))


@pytest.mark.parametrize(
    ("environ", "exporters"),
    [
        ({}, ()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ("otlp",)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, ("otlp",)),
        ({"OTEL_TRACES_EXPORTER": "console"}, ("console",)),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, ("otlp", "console")),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ()),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}, ()),
    ],
)
def test_the_standard_variables_choose_the_exporters(environ: dict[str, str], exporters: tuple[str, ...]) -> None:
    assert span_exporters(environ) == exporters


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER=zipkin: expected otlp, console or none"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc: expected http/protobuf",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        span_exporters(environ)
    assert str(refused.value).startswith(message)


# As if the SDK were not installed: its modules are found nowhere.
WITHOUT_SDK = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
from queen.cli import main
sys.argv = ["queen", "serve", "--port", sys.argv[1]]
main()
"""


async def test_spans_without_the_sdk_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OTEL_TRACES_EXPORTER", "otlp")
    async with started(sys.executable, "-c", WITHOUT_SDK, str(free_port())) as served:
        assert await served.ended() == 1
    assert served.lines[0] == (
        "queen: OTEL_TRACES_EXPORTER=otlp enables tracing, but OpenTelemetry's SDK is not installed: "
        "pip install '.[server,otel]' in a clone, or unset the variable"
    )
