"""Windows against simple models of them, over any messages in any batches."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.streams import StateChanged, Stream
from queen.streams.records import any_ms, parse_iso_ms, to_iso
from queen.streams.windows import Cron, Sliding, SpanWindow, Tumbling
from tests.streams.driving import PARTITION, Driven

Event = tuple[str, int, int]
"""Key, time, and a number by which to tell it."""

EVENTS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30), st.integers(0, 999)), max_size=8)
BATCHES = st.lists(EVENTS, min_size=1, max_size=6)


def collected(stream: Stream) -> Stream:
    """Every window as the list of what is in it."""
    return stream.reduce(lambda acc, value: [*acc, value["id"]], []).map(with_context).to("out")


def with_context(value: Any, context: Any) -> Any:
    return {"key": context["key"], "start": context["windowStart"], "end": context["windowEnd"], "ids": value}


def by_event_time(**options: Any) -> dict[str, Any]:
    return {"event_time": lambda message: message["data"]["at"], "idle_flush_ms": 0} | options


def payloads(events: Iterable[Event]) -> list[dict[str, Any]]:
    return [{"k": key, "at": at * 100, "id": id} for key, at, id in events]


def keyed() -> Stream:
    return Stream.from_("in").key_by(lambda message: message["data"]["k"])


def seen(emitted: Iterable[Any]) -> list[Any]:
    return sorted(json.dumps(one, sort_keys=True) for one in emitted)


class SpanModel:
    """Windows of fixed spans by the book: a table of windows, a watermark, and what closed."""

    def __init__(self, size: int, slide: int, *, grace: int, lateness: int, drop: bool) -> None:
        self._size, self._slide, self._grace, self._lateness, self._drop = size, slide, grace, lateness, drop
        self._watermark: int | None = None
        self.open: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.emitted: list[dict[str, Any]] = []
        self.late = 0

    def add(self, events: Iterable[Event]) -> None:
        timed = [(key, at * 100, id) for key, at, id in events]
        for key, at, id in timed:
            if self._watermark is not None and at < self._watermark and self._drop:
                self.late += 1
                continue
            for start in range(-self._size, at + 1):
                if start % self._slide == 0 and start <= at < start + self._size:
                    self.open[key, start].append(id)
        for _, at, _ in timed:
            reached = at - self._lateness
            self._watermark = reached if self._watermark is None else max(self._watermark, reached)
        for key, start in list(self.open):
            end = start + self._size
            if self._watermark is not None and end + self._grace <= self._watermark:
                ids = self.open.pop((key, start))
                self.emitted.append({"key": key, "start": start, "end": end, "ids": ids})


def check_spans(build: Callable[..., Stream], size: int, slide: int, batches: list[list[Event]], **shape: Any) -> None:
    grace, lateness, on_late = shape["grace"], shape["lateness"], shape["on_late"]
    model = SpanModel(size, slide, grace=grace, lateness=lateness, drop=on_late == "drop")
    options = by_event_time(grace_period=grace / 1000, allowed_lateness=lateness / 1000, on_late=on_late)

    async def drive() -> Driven:
        driven = Driven(collected(build(**options)))
        for batch in batches:
            if batch:
                await driven.run(payloads(batch))
                model.add(batch)
        return driven

    driven = asyncio.run(drive())
    assert seen(driven.emitted) == seen(model.emitted)
    stored = {
        (key.split("\x1f")[2], value["windowStart"]): value["acc"]
        for key, value in driven.broker.values(PARTITION).items()
        if key != "__wm__"
    }
    assert stored == dict(model.open)
    assert driven.metrics.snapshot()["lateEventsTotal"] == model.late
    assert driven.errors == []


SHAPES = st.fixed_dictionaries(
    {
        "grace": st.sampled_from([0, 300, 1000]),
        "lateness": st.sampled_from([0, 500, 5000]),
        "on_late": st.sampled_from(["drop", "include"]),
    }
)


@settings(max_examples=60, deadline=None)
@given(BATCHES, SHAPES)
def test_tumbling_windows_are_as_the_model_says(batches: list[list[Event]], shape: dict[str, Any]) -> None:
    check_spans(lambda **options: keyed().window_tumbling(seconds=0.7, **options), 700, 700, batches, **shape)


@settings(max_examples=60, deadline=None)
@given(BATCHES, SHAPES)
def test_sliding_windows_are_as_the_model_says(batches: list[list[Event]], shape: dict[str, Any]) -> None:
    check_spans(lambda **options: keyed().window_sliding(size=1.5, slide=0.5, **options), 1500, 500, batches, **shape)


@settings(max_examples=60, deadline=None)
@given(BATCHES, SHAPES)
def test_cron_windows_are_as_the_model_says(batches: list[list[Event]], shape: dict[str, Any]) -> None:
    check_spans(lambda **options: keyed().window_cron(every="second", **options), 1000, 1000, batches, **shape)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60)), max_size=30),
    st.lists(st.integers(1, 6), min_size=30, max_size=30),
    st.randoms(use_true_random=False),
)
def test_sessions_are_runs_of_values_without_a_gap(
    moments: list[tuple[str, int]], sizes: list[int], random: Any
) -> None:
    """In order from batch to batch, in any order inside one, every value is in the session of its neighbours."""
    gap = 500
    events = [(key, at, id) for id, (key, at) in enumerate(sorted(moments, key=lambda moment: moment[1]))]
    expected: dict[str, list[list[Event]]] = {"a": [], "b": []}
    for event in events:
        runs = expected[event[0]]
        # Times are whole tenths of seconds and the gap lies between two, so that nothing hangs on an instant.
        if runs and event[1] * 100 - runs[-1][-1][1] * 100 <= gap + 50:
            runs[-1].append(event)
        else:
            runs.append([event])

    async def drive() -> Driven:
        stream = keyed().window_session(gap=(gap + 50) / 1000, **by_event_time())
        driven = Driven(collected(stream))
        rest = list(events)
        for size in sizes:
            batch, rest = rest[:size], rest[size:]
            if batch:
                random.shuffle(batch)
                await driven.run(payloads(batch))
        assert not rest
        return driven

    driven = asyncio.run(drive())
    found = [(one["key"], one["start"], one["end"], sorted(one["ids"])) for one in driven.emitted]
    for key, value in driven.broker.values(PARTITION).items():
        if key != "__wm__":
            found.append((key.split("\x1f")[2], value["sessionStart"], value["windowEnd"], sorted(value["acc"])))
    assert sorted(found) == sorted(
        (key, run[0][1] * 100, run[-1][1] * 100 + gap + 50, sorted(id for _, _, id in run))
        for key, runs in expected.items()
        for run in runs
    )


async def test_a_session_that_ends_and_begins_again_in_one_batch_is_stored_once() -> None:
    driven = Driven(collected(keyed().window_session(gap=1, **by_event_time())))
    await driven.run([{"k": "a", "at": 0, "id": 1}])
    await driven.run([{"k": "a", "at": 5000, "id": 2}, {"k": "b", "at": 9000, "id": 3}])
    assert [one["ids"] for one in driven.emitted] == [[1], [2]]
    assert set(driven.broker.values(PARTITION)) == {"__wm__", "sess:1\x1fopen\x1fb"}


async def test_an_earlier_value_widens_the_open_session() -> None:
    driven = Driven(collected(keyed().window_session(gap=10, allowed_lateness=60, **by_event_time())))
    await driven.run([{"k": "a", "at": 30_000, "id": 1}])
    await driven.run([{"k": "a", "at": 25_000, "id": 2}])
    await driven.run([{"k": "b", "at": 200_000, "id": 3}])
    assert driven.emitted == [{"key": "a", "start": 25_000, "end": 40_000, "ids": [1, 2]}]


async def test_sessions_of_another_sdk_are_taken_over() -> None:
    driven = Driven(collected(keyed().window_session(gap=1, idle_flush_ms=10)))
    old = {"acc": [1], "sessionStart": 1000, "lastEventTime": 2000}
    driven.broker.state[PARTITION, "sess:1\x1fopen\x1fa"] = (old, 1)
    driven.windows.partition(PARTITION, "Default").unread = True
    await driven.flush()
    assert driven.emitted == [{"key": "a", "start": 1000, "end": 3000, "ids": [1]}]
    assert driven.broker.state == {}


async def test_the_watermark_is_kept_and_never_goes_back() -> None:
    stream = collected(keyed().window_tumbling(seconds=1, **by_event_time(allowed_lateness=1)))
    driven = Driven(stream)
    await driven.run([{"k": "a", "at": 5000, "id": 1}])
    assert driven.broker.values(PARTITION)["__wm__"] == {"eventTimeMs": 4000}
    # Another runner takes over, and knows it.
    other = Driven(stream, driven.broker)
    await other.run([{"k": "a", "at": 4000, "id": 2}, {"k": "a", "at": 3999, "id": 3}])
    assert driven.broker.values(PARTITION)["__wm__"] == {"eventTimeMs": 4000}
    assert other.metrics.snapshot()["lateEventsTotal"] == 1


async def test_by_processing_time_the_newest_message_closes_windows_after_the_grace_period() -> None:
    driven = Driven(collected(keyed().window_tumbling(seconds=1, grace_period=2)))
    await driven.run([{"k": "a", "id": 1}, {"k": "a", "id": 2}], created_ms=[0, 2999])
    assert driven.emitted == []
    await driven.run([{"k": "b", "id": 3}], created_ms=3000)
    assert [one["ids"] for one in driven.emitted] == [[1]]


async def test_idle_windows_are_flushed_once() -> None:
    driven = Driven(collected(keyed().window_tumbling(seconds=1)))
    await driven.run([{"k": "a", "id": 1}], created_ms=0)
    await driven.flush()
    await driven.flush()
    assert [one["ids"] for one in driven.emitted] == [[1]]
    assert driven.metrics.snapshot()["flushCyclesTotal"] == 1
    assert driven.windows.ripe(1 << 60) == []


async def test_windows_that_are_not_over_are_not_flushed() -> None:
    driven = Driven(collected(keyed().window_tumbling(seconds=3600)))
    now = int(time.time() * 1000)
    await driven.run([{"k": "a", "id": 1}], created_ms=now)
    await driven.flush()
    assert driven.emitted == []
    assert len(driven.windows.ripe(now + 3_600_000)) == 1


async def test_a_batch_whose_state_another_runner_changed_is_computed_again_when_it_is_redelivered() -> None:
    driven = Driven(collected(keyed().window_tumbling(seconds=1)))
    other = Driven(collected(keyed().window_tumbling(seconds=1)), driven.broker)
    await driven.run([{"k": "a", "id": 1}], created_ms=100)

    flushed = False

    async def meanwhile(accumulator: list[int], value: Any) -> list[int]:
        nonlocal flushed
        if not flushed:
            flushed = True
            other.windows.partition(PARTITION, "Default").unread = True
            await other.flush()
        return [*accumulator, value["id"]]

    third = Driven(keyed().window_tumbling(seconds=1).reduce(meanwhile, []).map(with_context).to("out"), driven.broker)
    with pytest.raises(StateChanged):
        await third.run([{"k": "a", "id": 2}], created_ms=200)
    await third.run([{"k": "a", "id": 2}], created_ms=200)
    await third.run([{"k": "a", "id": 3}], created_ms=5000)
    # The first was emitted by the flush; the second is counted once, in a window of its own.
    assert [one["ids"] for one in driven.emitted] == [[1], [2]]


async def test_a_message_without_a_time_is_reported_and_left_out() -> None:
    driven = Driven(collected(keyed().window_tumbling(seconds=1, **by_event_time())))
    await driven.run([{"k": "a", "id": 1}, {"k": "a", "at": 100, "id": 2}, {"k": "a", "at": None, "id": 3}])
    assert len(driven.errors) == 2
    assert driven.broker.acked[PARTITION] == 3
    await driven.run([{"k": "a", "at": 9000, "id": 4}])
    assert [one["ids"] for one in driven.emitted] == [[2]]


async def test_keys_with_any_characters_keep_their_windows_apart() -> None:
    keys = ["", "\x1f", "a\x1fb", "é😀", "__wm__", "x" * 300]
    driven = Driven(collected(keyed().window_tumbling(seconds=1)))
    for id in (1, 2):
        await driven.run([{"k": key, "id": id} for key in keys], created_ms=0)
    await driven.run([{"k": "z", "id": 3}], created_ms=1000)
    assert {one["key"]: one["ids"] for one in driven.emitted} == {key: [1, 2] for key in keys}


@pytest.mark.parametrize(
    ("every", "start", "end"),
    [
        ("second", "2026-03-29T01:30:15+00:00", "2026-03-29T01:30:16+00:00"),
        ("minute", "2026-03-29T01:30:00+00:00", "2026-03-29T01:31:00+00:00"),
        ("hour", "2026-03-29T01:00:00+00:00", "2026-03-29T02:00:00+00:00"),
        ("day", "2026-03-29T00:00:00+00:00", "2026-03-30T00:00:00+00:00"),
        ("week", "2026-03-23T00:00:00+00:00", "2026-03-30T00:00:00+00:00"),
    ],
)
@pytest.mark.parametrize("zone", ["UTC", "Europe/Rome", "America/New_York", "Asia/Kolkata", "Pacific/Chatham"])
def test_cron_windows_are_in_utc_whatever_the_zone_and_the_season(every: str, start: str, end: str, zone: str) -> None:
    """On the night on which Rome's clocks go from two to three."""
    with local_zone(zone):
        moment = datetime(2026, 3, 29, 1, 30, 15, 500_000, tzinfo=UTC).astimezone(ZoneInfo(zone))
        ms = any_ms(moment)
        assert ms is not None
        (span,) = Cron(every).spans(ms)
        assert (parse_iso_ms(start), parse_iso_ms(end)) == (span.start, span.end)
        assert span.key == start.replace("+00:00", ".000Z")
        # Without a zone it is the local time, as everywhere in Python.
        assert any_ms(moment.replace(tzinfo=None)) == ms


@contextmanager
def local_zone(zone: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TZ", zone)
        time.tzset()
        yield
    time.tzset()


@given(st.integers(-(10**12), 4 * 10**12))
def test_every_moment_is_in_the_windows_that_hold_it_and_no_others(ms: int) -> None:
    windows: list[tuple[SpanWindow, int]] = [(Tumbling(7), 1), (Sliding(60, 10), 6)]
    windows += [(Cron(every), 1) for every in ("second", "minute", "hour", "day", "week")]
    for window, count in windows:
        spans = window.spans(ms)
        assert len({span.key for span in spans}) == len(spans) == count
        assert all(span.start <= ms < span.end for span in spans)
        for span in spans:
            assert parse_iso_ms(span.key) == span.start


@given(st.datetimes(min_value=datetime(1900, 1, 1), max_value=datetime(2200, 1, 1), timezones=st.timezones()))
def test_times_are_read_to_the_millisecond(moment: datetime) -> None:
    exact = (moment.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    assert any_ms(moment) == exact
    assert any_ms(moment.astimezone(UTC).isoformat().replace("+00:00", "Z")) == exact
    assert parse_iso_ms(to_iso(exact)) == exact


def test_what_is_no_time_is_none() -> None:
    nothing: tuple[Any, ...] = (None, True, "yesterday", "", [], {})
    for value in nothing:
        assert any_ms(value) is None
    assert any_ms(12.9) == 12
