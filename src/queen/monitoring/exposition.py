"""Metrics in the text format of Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from queen.metrics.counters import Durations, Histogram, WorkerTally
from queen.metrics.report import ALIVE_SECONDS, Report
from queen.monitoring.scrape import Cluster, Inbox, Scrape

Values: TypeAlias = Iterable[tuple[Sequence[str], float]]

_OPS: Final = ("push", "pop", "ack")


def expose(scrape: Scrape, more: Sequence[Metric] = ()) -> bytes:
    """The response to a scrape: this host, the cluster, and further families."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(scrape, more))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, scrape: Scrape, more: Sequence[Metric]) -> None:
        self._scrape = scrape
        self._more = more

    def collect(self) -> Iterator[Metric]:
        reports, cluster = self._scrape.reports, self._scrape.cluster
        alive = [report for report in reports if report.at > time.time() - ALIVE_SECONDS]
        yield from _process(reports, alive)
        yield from _database(alive, cluster is not None)
        yield from _work(reports)
        yield from _topics(reports)
        yield from _other_counters(reports)
        yield from _histograms(reports)
        yield from _without_meaning()
        if cluster is not None:
            yield from _cluster(cluster.lifetime)
            yield from _workers(cluster.workers)
            yield from _queues(cluster, reports)
            yield from _dead_letters(cluster)
            yield from _paused(cluster)
            yield from _inbox(cluster.inbox)
            timers = cluster.timers
            yield _gauge("queen_timers_pending", "Timers that wait until they are due.", timers.pending)
            yield _gauge("queen_timers_due", "Timers that are due and have not fired.", timers.due)
            yield _gauge("queen_timer_lag_seconds", "For how long the first of them has been due.", timers.lag_seconds)
        yield from self._more


def _process(reports: Sequence[Report], alive: Sequence[Report]) -> Iterator[Metric]:
    now = time.time()
    started_at = min((report.started_at for report in alive), default=now)
    yield _gauge("queen_start_time_seconds", "When the oldest worker of this host was started, since 1970.", started_at)
    yield _gauge("queen_uptime_seconds", "Uptime of the oldest worker of this host.", now - started_at)
    yield _gauge("queen_workers", "Workers of this host that are running.", len(alive))
    yield _gauge("queen_process_resident_memory_bytes", "Resident memory of all workers.", _sum(alive, "rss_bytes"))
    yield _gauge("queen_process_virtual_memory_bytes", "Virtual memory of all workers.", _sum(alive, "virtual_bytes"))
    for index, kind in enumerate(("user", "system")):
        yield _counter(
            f"queen_cpu_{kind}_microseconds_total",
            f"{kind.capitalize()} CPU time of the workers of this host.",
            sum(report.cpu_seconds[index] for report in reports) * 1e6,
        )
    for name, meaning, gauge in (
        ("queen_response_registry_size", "Requests in flight.", "in_flight"),
        ("queen_parked_pops", "Long polls that wait for messages.", "parked"),
    ):
        values = [((str(report.worker_id),), report.last(gauge)) for report in alive]
        yield _labelled(GaugeMetricFamily, name, meaning, ("worker_id",), values)
    yield _labelled(
        GaugeMetricFamily,
        "queen_report_age_seconds",
        "Age of the last sample of each worker; 0 for the worker that serves this scrape.",
        ("worker_id",),
        [((str(report.worker_id),), max(0.0, now - report.at)) for report in reports],
    )


def _database(alive: Sequence[Report], up: bool) -> Iterator[Metric]:
    yield _gauge("queen_database_up", "1 if PostgreSQL responded; 0: cluster metrics are missing.", up)
    yield _gauge("queen_db_pool_size", "Open connections in the pools.", _sum(alive, "pool_size"))
    yield _gauge("queen_db_pool_idle", "Idle connections in the pools.", _sum(alive, "pool_idle"))
    yield _gauge("queen_db_pool_active", "Connections of the pools that are in use.", _sum(alive, "pool_active"))
    pools = (("db", _sum(alive, "pool_size"), _sum(alive, "job_queue")), ("system", 0.0, 0.0))
    yield _labelled(
        GaugeMetricFamily,
        "queen_threadpool_size",
        "Open connections in the pools (db); system is always 0, as there is no thread pool.",
        ("pool",),
        [((name,), size) for name, size, _ in pools],
    )
    yield _labelled(
        GaugeMetricFamily,
        "queen_threadpool_queue_size",
        "Requests that wait for the next batch (db); system is always 0.",
        ("pool",),
        [((name,), waiting) for name, _, waiting in pools],
    )


def _topics(reports: Sequence[Report]) -> Iterator[Metric]:
    items = Counter[str]()
    for report in reports:
        items.update(report.topics)
    yield _labelled(
        CounterMetricFamily,
        "queen_topic_items_total",
        "Topic items enqueued, dequeued, acked, nacked, dead-lettered (dead), or rejected by a quota (refused).",
        ("op", "namespace", "topic"),
        [(label.split("\n"), count) for label, count in sorted(items.items())],
    )
    took: dict[str, Durations] = {}
    for report in reports:
        for label, durations in report.topic_requests.items():
            took.setdefault(label, Durations()).add(durations)
    family = SummaryMetricFamily(
        "queen_topic_request_duration_seconds",
        "Latency of topic requests; of a long poll, from when it was woken.",
        labels=("op", "namespace", "topic"),
    )
    for label, durations in sorted(took.items()):
        family.add_metric(label.split("\n"), durations.count, durations.seconds)
    yield family


_DONE: Final = (
    ("auth", "queen_auth_refused_total", "Requests refused by access control, by reason.", ("reason",)),
    (
        "limit",
        "queen_limit_refused_total",
        "Requests and connections refused because there were too many.",
        ("limit",),
    ),
    (
        "conflated",
        "queen_conflated_messages_total",
        "Messages passed over because a group with conflation got a newer one of the partition.",
        ("queue",),
    ),
    ("kv", "queen_kv_operations_total", "Operations on keys, by what came of them.", ("op", "outcome")),
    ("lock", "queen_lock_operations_total", "Operations on locks, by what came of them.", ("op", "outcome")),
    ("timer", "queen_timer_operations_total", "Timers scheduled, cancelled and fired.", ("op", "outcome")),
    (
        "ephemeral",
        "queen_ephemeral_messages_total",
        "Messages of ephemeral queues pushed, popped, acknowledged and dropped.",
        ("op", "outcome"),
    ),
)
"""Counters of other work than messages: the name in reports, and the metric family with its labels."""


def _other_counters(reports: Sequence[Report]) -> Iterator[Metric]:
    done: Counter[str] = Counter()
    for report in reports:
        done.update(report.done)
    counted = [(label.split("\n"), count) for label, count in sorted(done.items())]
    for what, name, meaning, labels in _DONE:
        yield _labelled(
            CounterMetricFamily,
            name,
            meaning,
            labels,
            [(own[1 : 1 + len(labels)], count) for own, count in counted if own[0] == what],
        )


def _work(reports: Sequence[Report]) -> Iterator[Metric]:
    """Counters of the workers of this host; they never decrease while the supervisor runs."""
    total = _total(reports)
    yield _labelled(
        CounterMetricFamily,
        "queen_requests_total",
        "Requests received by this host.",
        ("op",),
        [
            (("push",), total.push_requests),
            (("pop",), total.pop_requests),
            (("ack",), total.ack_requests),
            (("transaction",), total.transactions),
        ],
    )
    yield _labelled(
        CounterMetricFamily,
        "queen_messages_total",
        "Messages pushed, popped and acknowledged on this host.",
        ("op",),
        [((op,), value) for op, value in _messages(total)],
    )
    yield _labelled(
        CounterMetricFamily,
        "queen_ack_total",
        "Acknowledgments: completed messages (success), reported failures and rejected acks (failed).",
        ("result",),
        [(("success",), total.ack_success), (("failed",), total.ack_failed)],
    )
    yield _counter("queen_pop_empty_total", "Pops that returned no message.", total.pop_empty)
    yield _counter("queen_auto_acked_total", "Messages acknowledged on delivery (autoAck).", total.auto_acked)
    yield _counter("queen_dead_letters_total", "Messages dead-lettered by acknowledgments.", total.dead_letters)
    yield _counter("queen_db_errors_total", "Statements failed: PostgreSQL unavailable or overloaded.", total.db_errors)
    yield _counter("queen_partitions_created_total", "Partitions created.", total.partitions_created)
    yield _counter("queen_partitions_deleted_total", "Partitions deleted.", total.partitions_deleted)
    failed: Counter[str] = Counter()
    for report in reports:
        failed.update(report.notification_errors)
    yield _labelled(
        CounterMetricFamily,
        "queen_notification_errors_total",
        "Notifications from other workers and hosts that could not be handled, by event kind.",
        ("kind",),
        [((kind,), count) for kind, count in sorted(failed.items())],
    )
    statuses: dict[int, int] = {}
    for report in reports:
        for status, count in report.statuses.items():
            statuses[status] = statuses.get(status, 0) + count
    yield _labelled(
        CounterMetricFamily,
        "queen_http_responses_total",
        "HTTP responses of this host, by status.",
        ("status",),
        [((str(status),), count) for status, count in sorted(statuses.items())],
    )


def _histograms(reports: Sequence[Report]) -> Iterator[Metric]:
    latencies = {op: _merged(reports, f"{op}_latency") for op in _OPS}
    batches = {op: _merged(reports, f"{op}_batches") for op in _OPS}
    meanings = {
        "push": "Latency of pushes.",
        "pop": "Latency of pops; of a long poll, from when messages were available.",
        "ack": "Latency of acknowledgments.",
    }
    for op, histogram in latencies.items():
        yield HistogramMetricFamily(
            f"queen_{op}_latency_seconds", meanings[op], buckets=histogram.cumulative(), sum_value=histogram.total
        )
    sizes = HistogramMetricFamily("queen_fusion_batch_size", "Requests (pop: partitions) per batch.", labels=["op"])
    for op, histogram in batches.items():
        sizes.add_metric([op], buckets=histogram.cumulative(), sum_value=histogram.total)
    yield sizes
    for name, meaning, values in (
        ("op_count", "Batches (database round trips).", {op: sum(batches[op].counts) for op in _OPS}),
        (
            "op_latency_microseconds",
            "Mean latency of requests; the histograms have the distribution.",
            {op: 1e6 * latencies[op].total / max(1, sum(latencies[op].counts)) for op in _OPS},
        ),
        ("op_items", "Requests (pop: partitions) in these batches.", {op: batches[op].total for op in _OPS}),
    ):
        yield _labelled(
            GaugeMetricFamily, f"queen_sidecar_{name}", meaning, ("op",), [((op,), values[op]) for op in _OPS]
        )


def _without_meaning() -> Iterator[Metric]:
    """Families that other servers of this protocol expose."""
    for name in ("groups", "queues", "avg_interval_milliseconds"):
        yield _gauge(f"queen_queue_backoff_{name}", "Always 0: long polls are woken and do not back off.", 0)


def _cluster(total: WorkerTally) -> Iterator[Metric]:
    scope, labels = ("cluster",), ("scope",)

    def counter(name: str, meaning: str, value: int) -> Metric:
        return _labelled(CounterMetricFamily, f"queen_cluster_{name}", meaning, labels, [(scope, value)])

    late = "of all hosts since the beginning, other hosts as of their last flush"
    yield counter("push_requests_total", f"Push requests {late}.", total.push_requests)
    yield counter("pop_requests_total", f"Pop requests {late}.", total.pop_requests)
    yield counter("ack_requests_total", f"Ack requests {late}.", total.ack_requests)
    yield counter("transactions_total", f"Transactions {late}.", total.transactions)
    for op, value in _messages(total):
        yield counter(f"{op}_messages_total", f"Messages ({op}) {late}.", value)
    yield counter(
        "db_errors_total", f"Statements failed: PostgreSQL unavailable or overloaded {late}.", total.db_errors
    )
    yield counter("dlq_total", f"Messages moved to the dead-letter queue {late}.", total.dead_letters)
    yield _labelled(
        CounterMetricFamily,
        "queen_cluster_ack_total",
        f"Acknowledgments {late}.",
        ("scope", "result"),
        [(("cluster", "success"), total.ack_success), (("cluster", "failed"), total.ack_failed)],
    )


def _workers(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Every worker of every host, as of its last flush."""
    labels = ("hostname", "worker_id", "pid")

    def who(row: Mapping[str, Any]) -> tuple[str, str, str]:
        return str(row["host"]), str(row["worker_id"]), str(row["pid"])

    def gauge(name: str, meaning: str, values: Callable[[Mapping[str, Any]], dict[str, float]], *extra: str) -> Metric:
        found = [((*who(row), *((key,) if extra else ())), value) for row in rows for key, value in values(row).items()]
        return _labelled(GaugeMetricFamily, f"queen_worker_{name}", meaning, (*labels, *extra), found)

    def minute(row: Mapping[str, Any], *names: str) -> dict[str, float]:
        return {name: row[name] * 60 / row["seconds"] for name in names}

    def sampled(row: Mapping[str, Any], name: str, *stats: str) -> dict[str, float]:
        places = {"avg": 0, "min": 1, "max": 2, "last": 3}
        return {stat: (row.get(name) or (0.0,) * 4)[places[stat]] for stat in stats}

    yield gauge(
        "event_loop_lag_milliseconds", "Event loop lag.", lambda row: sampled(row, "loop_lag_ms", "avg", "max"), "stat"
    )
    yield gauge(
        "lag_milliseconds",
        "Age of messages when they were popped.",
        lambda row: {"avg": row["lag_ms"] / max(1, row["pop_messages"]), "max": row["lag_max_ms"]},
        "stat",
    )
    yield gauge(
        "free_slots",
        "Pool connections that are not in use.",
        lambda row: sampled(row, "free_slots", "avg", "min"),
        "stat",
    )
    yield gauge(
        "job_queue_size",
        "Requests that waited for the next batch.",
        lambda row: sampled(row, "job_queue", "avg", "max"),
        "stat",
    )
    yield gauge("db_connections", "Connections to PostgreSQL.", lambda row: sampled(row, "db_connections", "last"))
    yield gauge("backoff_size", "Always 0: long polls are woken and do not back off.", lambda row: {"": 0.0})
    yield gauge("jobs_done_per_minute", "Batches (database round trips).", lambda row: minute(row, "batches"))
    yield gauge(
        "db_errors_per_minute",
        "Statements failed: PostgreSQL unavailable or overloaded.",
        lambda row: minute(row, "db_errors"),
    )
    yield gauge("dlq_per_minute", "Messages moved to the dead-letter queue.", lambda row: minute(row, "dead_letters"))
    yield gauge("metrics_age_seconds", "Time since the last flush.", lambda row: {"": row["age"]})
    yield gauge(
        "requests_per_minute",
        "Requests.",
        lambda row: {
            op: row[key] * 60 / row["seconds"]
            for op, key in (*((op, f"{op}_requests") for op in _OPS), ("transaction", "transactions"))
        },
        "op",
    )
    yield gauge(
        "messages_per_minute",
        "Messages.",
        lambda row: {
            "push": row["push_messages"] * 60 / row["seconds"],
            "pop": row["pop_messages"] * 60 / row["seconds"],
            "ack": (row["ack_success"] + row["ack_failed"]) * 60 / row["seconds"],
        },
        "op",
    )
    yield gauge(
        "ack_per_minute",
        "Acknowledgments.",
        lambda row: {what: row[f"ack_{what}"] * 60 / row["seconds"] for what in ("success", "failed")},
        "result",
    )


def _queues(cluster: Cluster, reports: Sequence[Report]) -> Iterator[Metric]:
    """The queues with the most pending messages."""
    names = cluster.queues
    rates = cluster.rates

    def rate(queue: str, key: str) -> float:
        return float(rates[queue][key]) if queue in rates else 0.0

    def gauge(name: str, meaning: str, value: Callable[[str], float]) -> Metric:
        return _labelled(
            GaugeMetricFamily, f"queen_queue_{name}", meaning, ("queue",), [((queue,), value(queue)) for queue in names]
        )

    yield _gauge(
        "queen_metrics_queues_left_out",
        "Queues without metrics, because there are more than METRICS_MAX_QUEUES.",
        cluster.queues_left_out,
    )
    yield _gauge(
        "queen_metrics_lags_left_out",
        "Queue-group pairs missing from queen_queue_lag_messages: more than 10 * METRICS_MAX_QUEUES.",
        cluster.lags_left_out,
    )
    yield _labelled(
        GaugeMetricFamily,
        "queen_queue_lag_messages",
        "Messages not yet consumed by the group (exact).",
        ("queue", "group"),
        [((lag.queue, lag.group), lag.messages) for lag in cluster.lags],
    )
    yield gauge(
        "pending_messages",
        "Messages not yet consumed by the slowest group, or all messages without any group (exact).",
        lambda queue: cluster.pending[queue],
    )
    own = {queue: [report.queues[queue] for report in reports if queue in report.queues] for queue in names}
    yield _labelled(
        CounterMetricFamily,
        "queen_queue_messages_total",
        "Messages pushed, popped and acknowledged on this host.",
        ("queue", "op"),
        [
            ((queue, op), value)
            for queue in names
            for op, value in (
                ("push", sum(tally.push_messages for tally in own[queue])),
                ("pop", sum(tally.pop_messages for tally in own[queue])),
                ("ack", sum(tally.ack_success + tally.ack_failed for tally in own[queue])),
            )
        ],
    )
    for name, meaning in (
        ("pop_messages", "Messages popped"),
        ("push_requests", "Push requests"),
        ("push_messages", "Messages pushed"),
        ("pop_empty", "Pops that returned no message"),
        ("transactions", "Transactions"),
    ):
        yield gauge(
            f"{name}_per_minute", f"{meaning} per minute on all hosts, as of their last flush.", partial(rate, key=name)
        )
    yield gauge("parked_consumers", "Long polls that waited, on average.", lambda queue: rate(queue, "parked"))
    yield gauge(
        "metrics_age_seconds",
        "Age of the oldest flush in the per-minute metrics of the queue.",
        lambda queue: rate(queue, "age"),
    )
    yield _labelled(
        GaugeMetricFamily,
        "queen_queue_pop_lag_milliseconds",
        "Age of messages when they were popped.",
        ("queue", "stat"),
        [
            ((queue, stat), value)
            for queue in names
            for stat, value in (
                ("avg", rate(queue, "lag_ms") / max(1.0, rate(queue, "popped"))),
                ("max", rate(queue, "lag_max_ms")),
            )
        ],
    )
    yield _labelled(
        GaugeMetricFamily,
        "queen_queue_ack_per_minute",
        "Acknowledgments per minute on all hosts, as of their last flush.",
        ("queue", "result"),
        [((queue, what), rate(queue, f"ack_{what}")) for queue in names for what in ("success", "failed")],
    )


def _inbox(inbox: Inbox) -> Iterator[Metric]:
    yield _gauge("queen_inbox_rows", "Rows of pushes from SQL that wait to be appended.", inbox.rows)
    yield _gauge("queen_inbox_oldest_seconds", "Age of the oldest of them.", inbox.oldest_seconds)
    yield _labelled(
        CounterMetricFamily,
        "queen_inbox_messages_total",
        "Messages and items pushed from SQL that left the inbox: appended, found to be duplicates, or not stored.",
        ("outcome",),
        [
            (("appended",), inbox.appended),
            (("duplicate",), inbox.duplicates),
            (("dead_letter",), inbox.dead_letters),
            (("refused",), inbox.refused),
        ],
    )


def _dead_letters(cluster: Cluster) -> Iterator[Metric]:
    yield _labelled(
        GaugeMetricFamily,
        "queen_dlq_depth",
        "Dead letters.",
        ("scope",),
        [(("cluster",), sum(cluster.dead_letters.values()))],
    )
    yield _labelled(
        GaugeMetricFamily,
        "queen_dlq_depth_by_queue",
        "Dead letters.",
        ("queue",),
        [((queue,), cluster.dead_letters.get(queue, 0)) for queue in cluster.queues],
    )


def _paused(cluster: Cluster) -> Iterator[Metric]:
    """What is paused has a series of 1, and what is not has none."""
    for what, labels, paused in (
        ("queue", ("queue",), [(queue,) for queue in cluster.paused]),
        ("group", ("queue", "group"), cluster.paused_groups),
        ("topic", ("namespace", "topic"), cluster.paused_topics),
    ):
        yield _labelled(
            GaugeMetricFamily,
            f"queen_{what}_paused",
            f"1 for each {what} that is paused.",
            labels,
            [(own, 1) for own in sorted(paused)],
        )


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(name, meaning, value=value)


def _labelled(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    meaning: str,
    labels: Sequence[str],
    values: Values,
) -> Metric:
    metric = family(name, meaning, labels=labels)
    for own, value in values:
        metric.add_metric(own, value)
    return metric


def _total(reports: Sequence[Report]) -> WorkerTally:
    total = WorkerTally()
    for report in reports:
        total.add(report.total)
    return total


def _messages(total: WorkerTally) -> Iterator[tuple[str, int]]:
    yield "push", total.push_messages
    yield "pop", total.pop_messages
    yield "ack", total.ack_success + total.ack_failed


def _merged(reports: Sequence[Report], name: str) -> Histogram:
    merged: Histogram | None = None
    for report in reports:
        own = report.histograms[name]
        if merged is None:
            merged = Histogram(own.bounds, list(own.counts), own.total)
        elif merged.bounds == own.bounds:
            merged.add(own)
    return merged if merged is not None else Histogram.of(())


def _sum(reports: Sequence[Report], name: str) -> float:
    return sum(report.last(name) for report in reports)
