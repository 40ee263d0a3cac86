"""Metrics of the pipelines that run on this host, from the files in which they say how they get on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from queen.wire.pipelines import PipelineState, PipelineStatus, statuses

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# A run that has said nothing for this long has died; its last numbers would only mislead.
_SILENT_SECONDS: Final = 300.0
_STATES: Final = tuple(state.value for state in PipelineState)


class PipelineFamilies:
    """A source of metric families for a scrape."""

    def __init__(self, data_dir: Path) -> None:
        self._directory = data_dir / "pipelines"

    def families(self) -> Iterator[Metric]:
        found = list(statuses(self._directory))
        if not found:
            return
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = time.time()
        states = GaugeMetricFamily("queen_pipeline_state", "1 for the state it is in.", labels=("pipeline", "state"))
        age = GaugeMetricFamily("queen_pipeline_report_age_seconds", "Since its last word.", labels=("pipeline",))
        dead = CounterMetricFamily(
            "queen_pipeline_dead_letters", "Records set aside since the run began.", labels=("pipeline",)
        )
        labels = ("pipeline", "sink")
        counters = (
            (CounterMetricFamily("queen_pipeline_rows", "Rows read since the run began.", labels=labels), "rows"),
            (CounterMetricFamily("queen_pipeline_written_rows", "Rows given to the sink.", labels=labels), "written"),
            (
                CounterMetricFamily("queen_pipeline_batches", "Batches done since the run began.", labels=labels),
                "batches",
            ),
            (CounterMetricFamily("queen_pipeline_late_rows", "Rows that came too late.", labels=labels), "late"),
        )
        gauges = (
            (
                GaugeMetricFamily("queen_pipeline_rows_per_second", "Rows read, lately.", labels=labels),
                "rows_per_second",
            ),
            (GaugeMetricFamily("queen_pipeline_lag_messages", "Messages not read yet.", labels=labels), "lag"),
            (
                GaugeMetricFamily("queen_pipeline_batch_seconds", "Length of the last batch.", labels=labels),
                "batch_seconds",
            ),
            (
                GaugeMetricFamily("queen_pipeline_state_rows", "Rows kept for windows and joins.", labels=labels),
                "state_rows",
            ),
        )
        for status in found:
            for state in _STATES:
                states.add_metric((status.name, state), float(state == _state(status, now)))
            age.add_metric((status.name,), now - status.updated_at)
            if _state(status, now) != PipelineState.RUNNING.value:
                continue
            dead.add_metric((status.name,), status.dead_letters)
            for query in status.queries:
                for family, field in (*counters, *gauges):
                    value = getattr(query, field)
                    if value is not None:
                        family.add_metric((status.name, query.name), value)
        yield from (states, age, dead, *(family for family, _ in (*counters, *gauges)))


def _state(status: PipelineStatus, now: float) -> str:
    live = status.state in (PipelineState.STARTING, PipelineState.RUNNING)
    return PipelineState.FAILED.value if live and now - status.updated_at > _SILENT_SECONDS else status.state.value
