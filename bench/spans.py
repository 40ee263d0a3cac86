"""Overhead of tracing per request, measured with a handler that does nothing."""

from __future__ import annotations

import timeit

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from queen.http.server.message import Access, Handler, Request, Response, Route
from queen.http.server.observe import watched
from queen.http.server.router import Router
from queen.http.tracing import Tracing

_TARGET = b"/api/v1/pop/queue/orders"
_CALLS = 50_000
_NOTHING = Response(204)


def main() -> None:
    print(f"without an exporter  {_microseconds(None):6.2f} µs")
    print(f"not sampled          {_microseconds(TracerProvider(sampler=ALWAYS_OFF)):6.2f} µs")
    print(f"recorded             {_microseconds(TracerProvider()):6.2f} µs")


def _microseconds(provider: TracerProvider | None) -> float:
    tracing = Tracing(provider.get_tracer("bench")) if provider is not None else None

    def around(route: Route) -> Handler:
        begin = tracing.watching(route) if tracing is not None else None
        return watched(route.handler, begin) if begin is not None else route.handler

    router = Router(around if tracing is not None else None)
    router.add("GET", "/api/v1/pop/queue/{queue}", lambda request: _NOTHING, Access.PUBLIC)
    match = router.match(b"GET", _TARGET)
    request = Request("GET", match.path, match.params, match.query, {}, b"")
    return min(timeit.repeat(lambda: match.handler(request), number=_CALLS, repeat=3)) / _CALLS * 1e6


if __name__ == "__main__":
    main()
