"""Metrics of a host besides its queues: spool, maintenance modes, dedup filter, topics, peers, pipelines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from queen.broker.broker import Broker
from queen.wire.pipelines import PipelineState, PipelineStatus, statuses

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class HostFamilies:
    """Metric families of this host, each method one source for the scrape."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def spool(self) -> Iterator[Metric]:
        """The spool of this host; every worker reports the same."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        broker, stats = self._broker, self._broker.spool.stats()
        for name, meaning, value in (
            ("queen_file_buffer_pending", "Messages in the spool, not yet in PostgreSQL.", stats.messages),
            ("queen_file_buffer_failed", "Spool records rejected and quarantined.", stats.failed_records),
            ("queen_file_buffer_db_healthy", "1 if PostgreSQL is available.", not broker.database.availability.down),
            ("queen_maintenance_mode_enabled", "1 if pushes go to the spool.", broker.modes.push_maintenance),
            ("queen_pop_maintenance_mode_enabled", "1 if pops return nothing.", broker.modes.pop_maintenance),
            ("queen_spool_records", "Spool records to be replayed.", stats.records),
            ("queen_spool_bytes", "Disk space of the spool records to be replayed.", stats.bytes),
            ("queen_spool_oldest_seconds", "Age of the oldest spool record to be replayed.", stats.oldest_seconds),
            ("queen_spool_replay_messages_per_second", "Replay rate of the last batch.", stats.replay_per_second),
            ("queen_spool_failed_bytes", "Disk space of quarantined spool records.", stats.failed_bytes),
            ("queen_spool_healthy", "1 if the last write of this worker to the spool succeeded.", stats.healthy),
        ):
            yield GaugeMetricFamily(name, meaning, value=float(value))
        for name, meaning, count in (
            ("queen_spool_messages", "Messages written to the spool.", stats.spooled_messages),
            ("queen_spool_replayed_messages", "Messages replayed from the spool.", stats.replayed_messages),
            ("queen_spool_damaged", "Corrupt sections of spool files, quarantined.", stats.damaged),
        ):
            yield CounterMetricFamily(name, meaning, value=count)

    def shards(self) -> Iterator[Metric]:
        """Which shards are available to this worker."""
        from prometheus_client.core import GaugeMetricFamily

        up = GaugeMetricFamily("queen_shard_up", "1 if the shard is available to this worker.", labels=("shard",))
        for number, broker in enumerate(self._broker.siblings or (self._broker,)):
            up.add_metric((str(number),), float(not broker.database.availability.down))
        yield up

    def transaction_ids(self) -> Iterator[Metric]:
        """The dedup filter of the worker that serves the scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        dedups = [broker.dedup for broker in self._broker.siblings or (self._broker,)]
        for name, meaning, size in (
            ("memory", "Memory of the dedup filter.", sum(dedup.filter.nbytes for dedup in dedups)),
            ("disk", "Disk space of the dedup filter.", sum(dedup.filter.disk_bytes for dedup in dedups)),
        ):
            yield GaugeMetricFamily(f"queen_dedup_{name}_bytes", meaning, value=size)
        yield CounterMetricFamily(
            "queen_dedup_lookups",
            "Lookups of possible duplicates in PostgreSQL.",
            value=sum(dedup.lookups for dedup in dedups),
        )

    def topics(self) -> Iterator[Metric]:
        """Prefetch buffers, tenant throttle and Redis of the worker that serves the scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        topics, redis = self._broker.topics, self._broker.topics.redis
        yield GaugeMetricFamily(
            "queen_topic_courtesy_pause",
            "Current pause of throttled namespaces, as a multiple of the duration of their batches.",
            value=topics.throttle.pause if topics.throttle is not None else 0.0,
        )
        if topics.prefetch is not None:
            buffers, stats = topics.prefetch.by_topic.values(), topics.prefetch.stats
            depth = sum(buffer.depth for buffer in buffers)
            for name, meaning, size in (
                ("queen_topic_ready_depth", "Items in the prefetch buffers that this worker uses.", depth),
                ("queen_topic_ready_queues", "Topics that this worker serves from prefetch buffers.", len(buffers)),
            ):
                yield GaugeMetricFamily(name, meaning, value=size)
            for name, meaning, count in (
                ("queen_topic_prefetches", "Batches of items leased for prefetch buffers.", stats.fills),
                ("queen_topic_prefetched_items", "Items leased for prefetch buffers.", stats.filled),
                ("queen_topic_ready_items", "Items delivered from prefetch buffers.", stats.handed_out),
                ("queen_topic_ready_recalls", "Prefetch buffers closed, their items released.", stats.recalls),
            ):
                yield CounterMetricFamily(name, meaning, value=count)
        if redis is not None:
            yield GaugeMetricFamily("queen_redis_up", "1 if Redis is available to this worker.", value=redis.up)
            yield CounterMetricFamily("queen_redis_errors", "Redis commands that failed.", value=redis.errors)

    def topic_buffer(self) -> Iterator[Metric]:
        """The write-ahead log of buffered namespaces of this host; every worker reports the same."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        wals = [broker.topics.wal for broker in self._broker.siblings or (self._broker,)]
        stats = [wal.stats() for wal in wals]
        for name, meaning, value in (
            ("items", "Buffered items, not yet in PostgreSQL.", sum(one.messages for one in stats)),
            ("oldest_seconds", "Age of the oldest of these items.", max(one.oldest_seconds for one in stats)),
        ):
            yield GaugeMetricFamily(f"queen_topic_buffer_{name}", meaning, value=float(value))
        for name, meaning, value in (
            ("wal_bytes", "Disk space of these items.", sum(one.bytes for one in stats)),
            ("wal_healthy", "1 if this worker can write to the log.", all(one.healthy for one in stats)),
            ("wal_failed", "Buffered items rejected and quarantined.", sum(one.failed_records for one in stats)),
            ("flush_items_per_second", "Rate of the last flush.", sum(one.replay_per_second for one in stats)),
        ):
            yield GaugeMetricFamily(f"queen_topic_{name}", meaning, value=float(value))
        breaker = GaugeMetricFamily(
            "queen_topic_breaker_state",
            "Circuit breaker between the log and PostgreSQL: 0 closed, 1 half-open, 2 open.",
            labels=("shard",),
        )
        for number, wal in enumerate(wals):
            breaker.add_metric((str(number),), wal.state.breaker)
        yield breaker
        for name, meaning, count in (
            ("buffered_items", "Items written to the log.", sum(one.spooled_messages for one in stats)),
            ("flushed_items", "Items flushed from the log to PostgreSQL.", sum(one.replayed_messages for one in stats)),
            ("backpressure_refusals", "Enqueues rejected: the buffer is full.", sum(one.refused for one in stats)),
            ("wal_damaged", "Corrupt sections of the log, quarantined.", sum(one.damaged for one in stats)),
        ):
            yield CounterMetricFamily(f"queen_topic_{name}", meaning, value=count)

    def peers(self) -> Iterator[Metric]:
        """Peers of the worker that serves the scrape; one gauge alone where none are configured."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats, catalog = self._broker.peers.stats(), self._broker.catalog
        yield GaugeMetricFamily("queen_shared_state_enabled", "1 if hosts exchange notifications.", value=stats.enabled)
        if not stats.transports:
            return
        yield GaugeMetricFamily("queen_qc_cache_size", "Queues in the cache of this worker.", value=catalog.size)
        yield CounterMetricFamily("queen_qc_cache_hits", "Hits of that cache.", value=catalog.hits)
        yield CounterMetricFamily("queen_qc_cache_misses", "Misses of that cache.", value=catalog.misses)
        servers = GaugeMetricFamily("queen_servers", "Other hosts by state.", labels=("state",))
        servers.add_metric(("alive",), stats.servers_alive)
        servers.add_metric(("dead",), stats.servers_dead)
        yield servers
        messages = CounterMetricFamily("queen_transport_messages", "Packets between hosts.", labels=("dir",))
        messages.add_metric(("sent",), stats.packets_sent + stats.requests_sent)
        messages.add_metric(("received",), stats.packets_received + stats.packets_relayed)
        yield messages
        dropped = CounterMetricFamily("queen_transport_dropped", "Packets rejected, by reason.", labels=("reason",))
        for reason, count in sorted(stats.dropped.items()):
            dropped.add_metric((reason,), count)
        yield dropped


# A run without an update for this long has died; its last values would mislead.
_SILENT_SECONDS: Final = 300.0
_STATES: Final = tuple(state.value for state in PipelineState)


class PipelineFamilies:
    """Metric families of the pipelines of this host."""

    def __init__(self, data_dir: Path) -> None:
        self._directory = data_dir / "pipelines"

    def families(self) -> Iterator[Metric]:
        found = list(statuses(self._directory))
        if not found:
            return
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = time.time()
        states = GaugeMetricFamily("queen_pipeline_state", "1 for the current state.", labels=("pipeline", "state"))
        age = GaugeMetricFamily(
            "queen_pipeline_report_age_seconds", "Time since its last update.", labels=("pipeline",)
        )
        dead = CounterMetricFamily(
            "queen_pipeline_dead_letters", "Dead letters since the run began.", labels=("pipeline",)
        )
        labels = ("pipeline", "sink")
        counters = (
            (CounterMetricFamily("queen_pipeline_rows", "Rows read since the run began.", labels=labels), "rows"),
            (CounterMetricFamily("queen_pipeline_written_rows", "Rows written to the sink.", labels=labels), "written"),
            (CounterMetricFamily("queen_pipeline_batches", "Batches since the run began.", labels=labels), "batches"),
            (CounterMetricFamily("queen_pipeline_late_rows", "Rows after the watermark.", labels=labels), "late"),
        )
        gauges = (
            (
                GaugeMetricFamily("queen_pipeline_rows_per_second", "Current rate of rows read.", labels=labels),
                "rows_per_second",
            ),
            (GaugeMetricFamily("queen_pipeline_lag_messages", "Messages not yet read.", labels=labels), "lag"),
            (
                GaugeMetricFamily("queen_pipeline_batch_seconds", "Duration of the last batch.", labels=labels),
                "batch_seconds",
            ),
            (
                GaugeMetricFamily("queen_pipeline_state_rows", "State rows of windows and joins.", labels=labels),
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
