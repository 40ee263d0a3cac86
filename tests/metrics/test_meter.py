"""Counting: tallies, histograms, gauges, and the reports in which workers tell of them."""

from __future__ import annotations

import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from queen.metrics.counters import BATCH_SIZES, Gauge, Histogram, Tally, WorkerTally
from queen.metrics.meter import Meter
from queen.metrics.report import Report, SnapshotStore, decode_report, encode_report, new_life


def report_of(meter: Meter, *, worker_id: int = 0, base: WorkerTally | None = None) -> Report:
    return Report(
        life=new_life(),
        host="host",
        port=6632,
        worker_id=worker_id,
        pid=1,
        started_at=1.0,
        at=61.0,
        flush=1,
        flushed_at=1.0,
        total=meter.total,
        base=base or WorkerTally(),
        queues=meter.queues,
        queue_bases={},
        histograms=dict(meter.histograms()),
        gauges={},
        parked={},
        statuses={200: 3},
    )


def test_a_push_to_several_queues_is_one_request_in_all_and_one_for_each_queue() -> None:
    meter = Meter()
    meter.push_requested(["a", "b", "a"])
    assert meter.total.push_requests == 1
    assert {name: tally.push_requests for name, tally in meter.queues.items()} == {"a": 1, "b": 1}


def test_lag_is_summed_over_messages_and_its_largest_is_kept() -> None:
    meter = Meter()
    stored = datetime.fromtimestamp(1000, UTC)
    older = datetime.fromtimestamp(998, UTC)
    meter.popped("a", [(2, older), (3, stored)], 1001.0, auto_ack=False)
    assert meter.queues["a"].lag_ms == 2 * 3000 + 3 * 1000
    assert meter.queues["a"].lag_max_ms == 3000
    assert (meter.total.pop_messages, meter.total.auto_acked) == (5, 0)


def test_clocks_that_differ_make_no_negative_lag() -> None:
    meter = Meter()
    meter.popped("a", [(1, datetime.fromtimestamp(1002, UTC))], 1001.0, auto_ack=True)
    assert (meter.total.lag_ms, meter.total.auto_acked) == (0, 1)


def test_counts_since_a_snapshot_are_separate_from_earlier_ones() -> None:
    tally = Tally(push_messages=5, lag_max_ms=7.0)
    base = tally.copy()
    tally.push_messages += 2
    assert tally.since(base) == Tally(push_messages=2, lag_max_ms=7.0)


def test_a_histogram_counts_each_value_in_the_bucket_that_is_just_large_enough() -> None:
    histogram = Histogram.of((1.0, 5.0))
    for value in (1, 2, 5, 6):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 1), ("5.0", 3), ("+Inf", 4)]
    assert histogram.total == 14


def test_a_gauge_remembers_its_mean_lowest_highest_and_last_sample() -> None:
    gauge = Gauge()
    for value in (4, 1, 7):
        gauge.sample(value)
    assert gauge.row() == [4, 1, 7, 7]


def test_more_queues_than_a_worker_should_meet_share_one_tally() -> None:
    meter = Meter()
    for number in range(10_050):
        meter.stored(f"queue-{number}", 1)
    assert len(meter.queues) == 10_001
    assert meter.queues[""].push_messages == 50
    assert meter.total.push_messages == 10_050


def test_a_report_survives_the_way_through_a_file() -> None:
    meter = Meter()
    meter.stored("a", 3)
    meter.push_batches.observe(4)
    report = report_of(meter)
    report.unsent = report_of(Meter())
    assert decode_report(encode_report(report)) == report
    with pytest.raises(msgspec.DecodeError):
        decode_report(b"something else")


async def test_a_worker_reads_what_the_others_have_pinned_up(tmp_path: Path) -> None:
    stores = [SnapshotStore(tmp_path, number, 3) for number in range(3)]
    meter = Meter()
    meter.stored("a", 3)
    await stores[1].publish(report_of(meter, worker_id=1))
    (tmp_path / "worker-2.report").write_bytes(b"of another version")
    assert [report.worker_id for report in await stores[0].others()] == [1]
    assert stores[0].own() is None
    resumed = Meter()
    before = stores[1].own()
    assert before is not None
    resumed.resume(before)
    resumed.stored("a", 1)
    assert (resumed.total.push_messages, resumed.queues["a"].push_messages) == (4, 4)


def test_rows_tell_what_was_counted_since_the_last_flush_of_queues_that_were_used() -> None:
    meter = Meter()
    meter.stored("used", 3)
    meter.queue("unused")
    report = report_of(meter)
    report.parked = {"awaited": Gauge(2, 6.0, 3.0, 3.0, 3.0)}
    rows = {row["queue_name"]: (row["push_messages"], row["parked"]) for row in report.queue_rows()}
    assert rows == {"used": (3, 0.0), "awaited": (0, 3.0)}
    (row,) = report.worker_rows()
    assert (row["push_messages"], row["seconds"], row["at"]) == (3, 60.0, "1970-01-01T00:00:01+00:00")


def test_counting_a_request_takes_few_calls_however_many_were_counted() -> None:
    """A push, a pop and an ack of one message each, with their histograms."""
    meter = Meter()
    latency, sizes = meter.push_latency, Histogram.of(BATCH_SIZES)
    stored, now = datetime.now(UTC), time.time()

    def count() -> None:
        meter.push_requested(["orders"])
        meter.stored("orders", 1)
        latency.observe(0.003)
        sizes.observe(3)
        meter.pop_requested(("orders",))
        meter.popped("orders", [(1, stored)], now, auto_ack=False)
        latency.observe(0.003)
        meter.acked("orders", 1)
        latency.observe(0.003)

    for _ in range(1000):
        count()
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        count()
    finally:
        sys.setprofile(None)
    assert calls["call"] + calls["c_call"] <= 40, calls


def test_what_others_count_is_among_what_was_done() -> None:
    meter = Meter()
    meter.count("auth", "role", "")
    refused = {"auth\nrole\n": 2, "limit\nincoming\n": 1}
    meter.sources.append(lambda: refused)
    refused["auth\nrole\n"] += 1
    assert meter.all_done() == {"auth\nrole\n": 4, "limit\nincoming\n": 1}
    # What was counted here stays apart: it is what the next report begins with.
    assert meter.done == {"auth\nrole\n": 1}
