"""Export of spans, configured by the standard OTEL_ variables. Without them nothing here is used or imported."""

from __future__ import annotations

import importlib.util
import socket
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from queen import __version__
from queen.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_NEEDED = {
    "console": "opentelemetry.sdk",
    "otlp": "opentelemetry.exporter.otlp.proto.http",
}


def span_exporters(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The exporters that the environment configures, `otlp` and `console`; none when tracing is off.

    Raises `SettingsError` when they are not supported or not installed.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    cause, exporters = _asked_for(environ)
    for exporter in exporters:
        if exporter not in _NEEDED:
            raise SettingsError(f"{cause}: expected otlp, console or none")
        if not _is_installed(_NEEDED[exporter]):
            raise SettingsError(
                f"{cause} enables tracing, but OpenTelemetry's SDK is not installed: "
                "pip install '.[server,otel]' in a clone, or unset the variable"
            )
    if "otlp" in exporters:
        _check_protocol(environ)
    return exporters


def start_tracing(environ: Mapping[str, str], worker_id: int) -> TracerProvider | None:
    """The provider of spans, if the environment configures one. The SDK reads the details itself."""
    exporters = span_exporters(environ)
    if not exporters:
        return None
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider

    ours = {
        "service.name": "queen",
        "service.version": __version__,
        "service.instance.id": f"{socket.gethostname()}/{worker_id}",
    }
    resource = Resource.create({**ours, **OTELResourceDetector().detect().attributes})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(_processor(exporter))
    return provider


def stop_tracing(provider: TracerProvider, seconds: float) -> None:
    """Send the remaining spans, waiting at most this long for the collector."""
    closing = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
    closing.start()
    closing.join(seconds)


def _asked_for(environ: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """The variable that enables spans, and the exporters it names."""
    named = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if named:
        exporters = tuple(name for part in named.split(",") if (name := part.strip().lower()) not in ("", "none"))
        return f"OTEL_TRACES_EXPORTER={named}", exporters
    for variable in _ENDPOINTS:
        if environ.get(variable, "").strip():
            return variable, ("otlp",)
    return "", ()


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _check_protocol(environ: Mapping[str, str]) -> None:
    for variable in _PROTOCOLS:
        protocol = environ.get(variable, "").strip()
        if protocol and protocol != _PROTOCOL:
            raise SettingsError(
                f"{variable}={protocol}: expected {_PROTOCOL}, which every collector takes (on port 4318 by default)"
            )
        if protocol:
            return


def _processor(exporter: str) -> SpanProcessor:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    if exporter == "console":
        return BatchSpanProcessor(ConsoleSpanExporter())
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return BatchSpanProcessor(OTLPSpanExporter())
