"""What was refused, and what clients hold, as metrics of the worker that answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from queen.http.server.limits import Budget

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def access_families(refused: Mapping[str, int], budget: Callable[[], Budget]) -> Callable[[], Iterable[Metric]]:
    """A source of metric families for requests that were refused before their handlers saw them."""

    def families() -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        held = budget()
        denied = CounterMetricFamily(
            "queen_auth_refused", "Requests refused because of who sent them, by reason.", labels=("reason",)
        )
        for reason, count in sorted(refused.items()):
            denied.add_metric((reason,), count)
        yield denied
        limited = CounterMetricFamily(
            "queen_limit_refused", "Requests and connections refused because there were too many.", labels=("limit",)
        )
        for what, count in sorted(held.refused.items()):
            limited.add_metric((what,), count)
        yield limited
        held_bytes = GaugeMetricFamily(
            "queen_http_held_bytes", "Bytes of requests that arrive or wait, and of unread answers.", labels=("side",)
        )
        held_bytes.add_metric(("incoming",), held.incoming)
        held_bytes.add_metric(("outgoing",), held.outgoing)
        yield held_bytes

    return families
