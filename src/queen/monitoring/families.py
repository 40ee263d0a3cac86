"""Metrics of what a host has besides its queues: the spool, maintenance, other hosts."""

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
    """Sources of metric families for a scrape."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def spool(self) -> Iterator[Metric]:
        """What is on disk of this host and not yet in PostgreSQL. The same from each of its workers."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        broker, stats = self._broker, self._broker.spool.stats()
        for name, meaning, value in (
            ("queen_file_buffer_pending", "Messages in the spool that wait for PostgreSQL.", stats.messages),
            ("queen_file_buffer_failed", "Records that were refused and set aside.", stats.failed_records),
            (
                "queen_file_buffer_db_healthy",
                "1 when PostgreSQL answers this worker.",
                not broker.database.availability.down,
            ),
            ("queen_maintenance_mode_enabled", "1 while pushes go to the spool.", broker.modes.push_maintenance),
            ("queen_pop_maintenance_mode_enabled", "1 while pops get nothing.", broker.modes.pop_maintenance),
            ("queen_spool_records", "Records that wait to be replayed.", stats.records),
            ("queen_spool_bytes", "Bytes that waiting records take on disk.", stats.bytes),
            ("queen_spool_oldest_seconds", "Age of the oldest waiting record.", stats.oldest_seconds),
            ("queen_spool_replay_messages_per_second", "Pace of the last round of replay.", stats.replay_per_second),
            ("queen_spool_failed_bytes", "Bytes of records that were set aside.", stats.failed_bytes),
            ("queen_spool_healthy", "1 when this worker's last write to the spool succeeded.", stats.healthy),
        ):
            yield GaugeMetricFamily(name, meaning, value=float(value))
        for name, meaning, count in (
            ("queen_spool_messages", "Messages written to the spool.", stats.spooled_messages),
            ("queen_spool_replayed_messages", "Messages that left the spool again.", stats.replayed_messages),
            ("queen_spool_damaged", "Stretches of bytes that were no whole records and were set aside.", stats.damaged),
        ):
            yield CounterMetricFamily(name, meaning, value=count)

    def shards(self) -> Iterator[Metric]:
        """Which databases answer this worker."""
        from prometheus_client.core import GaugeMetricFamily

        up = GaugeMetricFamily("queen_shard_up", "1 when the shard answers this worker.", labels=("shard",))
        for number, broker in enumerate(self._broker.siblings or (self._broker,)):
            up.add_metric((str(number),), float(not broker.database.availability.down))
        yield up

    def transaction_ids(self) -> Iterator[Metric]:
        """What the worker that answers remembers of transactionIds."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        dedups = [broker.dedup for broker in self._broker.siblings or (self._broker,)]
        for name, meaning, size in (
            ("memory", "Memory that transactionIds take.", sum(dedup.filter.nbytes for dedup in dedups)),
            ("disk", "Disk space that they take.", sum(dedup.filter.disk_bytes for dedup in dedups)),
        ):
            yield GaugeMetricFamily(f"queen_dedup_{name}_bytes", meaning, value=size)
        yield CounterMetricFamily(
            "queen_dedup_lookups",
            "Times that PostgreSQL was searched for a duplicate.",
            value=sum(dedup.lookups for dedup in dedups),
        )

    def topics(self) -> Iterator[Metric]:
        """Ready queues of topics and Redis, as the worker that answers sees them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        topics, redis = self._broker.topics, self._broker.topics.redis
        yield GaugeMetricFamily(
            "queen_topic_courtesy_pause",
            "How many times as long as their batches took busy namespaces pause for those that this worker serves.",
            value=topics.throttle.pause if topics.throttle is not None else 0.0,
        )
        if topics.prefetch is not None:
            buffers, stats = topics.prefetch.by_topic.values(), topics.prefetch.stats
            depth = sum(buffer.depth for buffer in buffers)
            for name, meaning, size in (
                ("queen_topic_ready_depth", "Items in ready queues used by this worker.", depth),
                ("queen_topic_ready_queues", "Topics this worker serves from ready queues.", len(buffers)),
            ):
                yield GaugeMetricFamily(name, meaning, value=size)
            for name, meaning, count in (
                ("queen_topic_prefetches", "Batches of items leased ahead.", stats.fills),
                ("queen_topic_prefetched_items", "Items leased ahead.", stats.filled),
                ("queen_topic_ready_items", "Items handed out of ready queues.", stats.handed_out),
                ("queen_topic_ready_recalls", "Ready queues that were closed, their items ready again.", stats.recalls),
            ):
                yield CounterMetricFamily(name, meaning, value=count)
        if redis is not None:
            yield GaugeMetricFamily("queen_redis_up", "1 when Redis answers this worker.", value=redis.up)
            yield CounterMetricFamily("queen_redis_errors", "Commands to Redis that failed.", value=redis.errors)

    def topic_buffer(self) -> Iterator[Metric]:
        """What this host has accepted for buffered namespaces and not stored yet. The same from each of its workers."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        wals = [broker.topics.wal for broker in self._broker.siblings or (self._broker,)]
        stats = [wal.stats() for wal in wals]
        for name, meaning, value in (
            ("items", "Items of buffered namespaces that wait to be stored.", sum(one.messages for one in stats)),
            ("oldest_seconds", "Age of the oldest of them.", max(one.oldest_seconds for one in stats)),
        ):
            yield GaugeMetricFamily(f"queen_topic_buffer_{name}", meaning, value=float(value))
        for name, meaning, value in (
            ("wal_bytes", "Bytes that they take on disk.", sum(one.bytes for one in stats)),
            ("wal_healthy", "1 when this worker can write to the log.", all(one.healthy for one in stats)),
            ("wal_failed", "Items that were refused and set aside.", sum(one.failed_records for one in stats)),
            ("flush_items_per_second", "Pace of the last flush.", sum(one.replay_per_second for one in stats)),
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
            ("flushed_items", "Items that left the log for PostgreSQL.", sum(one.replayed_messages for one in stats)),
            ("backpressure_refusals", "Enqueues refused: too many items wait.", sum(one.refused for one in stats)),
            ("wal_damaged", "Stretches that were no whole records, set aside.", sum(one.damaged for one in stats)),
        ):
            yield CounterMetricFamily(f"queen_topic_{name}", meaning, value=count)

    def peers(self) -> Iterator[Metric]:
        """Other hosts as the worker that answers sees them; nothing further where none are configured."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats, catalog = self._broker.peers.stats(), self._broker.catalog
        yield GaugeMetricFamily("queen_shared_state_enabled", "1 when hosts tell each other.", value=stats.enabled)
        if not stats.transports:
            return
        yield GaugeMetricFamily("queen_qc_cache_size", "Queues this worker remembers.", value=catalog.size)
        yield CounterMetricFamily("queen_qc_cache_hits", "Queues found among them.", value=catalog.hits)
        yield CounterMetricFamily("queen_qc_cache_misses", "Queues that had to be read.", value=catalog.misses)
        servers = GaugeMetricFamily("queen_servers", "Other hosts, by their heartbeats.", labels=("state",))
        servers.add_metric(("alive",), stats.servers_alive)
        servers.add_metric(("dead",), stats.servers_dead)
        yield servers
        messages = CounterMetricFamily("queen_transport_messages", "Packets among hosts.", labels=("dir",))
        messages.add_metric(("sent",), stats.packets_sent + stats.requests_sent)
        messages.add_metric(("received",), stats.packets_received + stats.packets_relayed)
        yield messages
        dropped = CounterMetricFamily("queen_transport_dropped", "Packets that were not taken in.", labels=("reason",))
        for reason, count in sorted(stats.dropped.items()):
            dropped.add_metric((reason,), count)
        yield dropped


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
