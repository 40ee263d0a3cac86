"""What was refused, and what clients hold, as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from queen.http.server.limits import Budget

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def refusals(refused: Mapping[str, int], budget: Callable[[], Budget]) -> Callable[[], dict[str, int]]:
    """A source for `Meter.sources`: requests and connections refused before a handler saw them."""

    def counted() -> dict[str, int]:
        by_sender = {f"auth\n{reason}\n": count for reason, count in refused.items()}
        return by_sender | {f"limit\n{what}\n": count for what, count in budget().refused.items()}

    return counted


def held_families(budget: Callable[[], Budget]) -> Callable[[], Iterable[Metric]]:
    """A source of metric families for what clients hold of the worker that answers."""

    def families() -> Iterable[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        held_bytes = GaugeMetricFamily(
            "queen_http_held_bytes", "Bytes of requests that arrive or wait, and of unread answers.", labels=("side",)
        )
        held_bytes.add_metric(("incoming",), budget().incoming)
        held_bytes.add_metric(("outgoing",), budget().outgoing)
        yield held_bytes

    return families
