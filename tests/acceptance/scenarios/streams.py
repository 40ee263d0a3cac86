"""Streams of the published client: windows, gates and sinks over queues, exactly once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from queen.streams import Stream, token_bucket_gate
from tests.acceptance.scenario import Message, Scene, scenario

FAR_AWAY_MS = 10_000_000


@asynccontextmanager
async def _running(scene: Scene, stream: Stream, query: str = "", **options: Any) -> AsyncIterator[Any]:
    runner = await stream.run(scene.queue_name(query or "query"), scene.url, **{"max_wait_millis": 300} | options)
    try:
        yield runner
    finally:
        await runner.stop()


async def _drain(scene: Scene, queue: str, count: int) -> list[Any]:
    """The payloads of so many messages, each acknowledged."""
    found: list[Any] = []
    while len(found) < count:
        messages = await scene.queen.queue(queue).batch(500).partitions(50).timeout_millis(2000).pop()
        if messages:
            await scene.queen.ack(messages)
            found += [message["data"] for message in messages]
    return found


async def _has_read(runner: Any, messages: int) -> None:
    """Until the stream has committed so many messages."""
    while True:
        if runner.metrics()["messagesTotal"] >= messages:
            return
        await asyncio.sleep(0.02)


async def _nothing_more(scene: Scene, queue: str) -> None:
    assert await scene.queen.queue(queue).wait(False).pop() == []


def _key(message: Message) -> Any:
    return message["data"]["k"]


def _at(message: Message) -> Any:
    return message["data"]["at"]


def _with_window(value: Any, context: Any) -> Any:
    return {"k": context["key"], "start": context["windowStart"], "end": context["windowEnd"], **value}


@scenario()
async def messages_are_mapped_filtered_and_split(scene: Scene) -> None:
    async with scene.queue("in") as source, scene.queue("out") as target:
        await scene.queen.queue(source).push([{"data": {"n": n}} for n in range(6)])
        stream = (
            Stream.from_(scene.queen.queue(source))
            .filter(lambda message: message["data"]["n"] % 2)
            .flat_map(lambda message: [{"n": message["data"]["n"]}, {"n": -message["data"]["n"]}])
            .to(scene.queen.queue(target))
        )
        async with _running(scene, stream) as runner:
            assert [one["n"] for one in await _drain(scene, target, 6)] == [1, -1, 3, -3, 5, -5]
        assert runner.metrics()["errorsTotal"] == 0, runner.metrics()
        await _nothing_more(scene, target)


@scenario()
async def effects_are_awaited_and_given_the_value(scene: Scene) -> None:
    async with scene.queue("in") as source:
        await scene.queen.queue(source).push([{"data": {"n": n}} for n in range(20)])
        seen: list[int] = []

        async def effect(value: Any) -> None:
            await asyncio.sleep(0)
            seen.append(value["n"])

        async with _running(scene, Stream.from_(scene.queen.queue(source)).foreach(effect)) as runner:
            await _has_read(runner, 20)
        assert seen == list(range(20))


@scenario(seconds=60)
async def five_thousand_events_over_twenty_partitions_are_counted_exactly(scene: Scene) -> None:
    async with scene.queue("in") as source, scene.queue("out") as target:
        for partition in range(20):
            events = [{"k": f"k{n % 5}-{partition}", "at": n * 100, "n": n} for n in range(250)]
            events.append({"k": "end", "at": FAR_AWAY_MS, "n": 0})
            await scene.queen.queue(source).partition(f"p{partition}").push([{"data": event} for event in events])
        stream = (
            Stream.from_(scene.queen.queue(source))
            .key_by(_key)
            .window_tumbling(seconds=10, event_time=_at)
            .aggregate({"count": lambda value: 1, "sum": lambda value: value["n"], "max": lambda value: value["n"]})
            .map(_with_window)
            .to(scene.queen.queue(target))
        )
        # Two of one query share the partitions.
        async with _running(scene, stream, batch_size=40), _running(scene, stream, batch_size=40):
            emitted = await _drain(scene, target, 20 * 5 * 3)
        assert Counter({(one["k"], one["start"]): one["count"] for one in emitted}) == Counter(
            (f"k{n % 5}-{partition}", n * 100 // 10_000 * 10_000) for partition in range(20) for n in range(250)
        )
        assert sum(one["sum"] for one in emitted) == 20 * sum(range(250))
        await _nothing_more(scene, target)


@scenario(seconds=60)
async def what_many_push_to_one_partition_at_once_is_counted_once(scene: Scene) -> None:
    """Messages of one millisecond may be sorted otherwise by the client than they lie in the partition."""
    async with scene.queue("in") as source, scene.queue("out") as target:
        stream = (
            Stream.from_(scene.queen.queue(source))
            .window_tumbling(seconds=10, event_time=_at)
            .aggregate({"count": lambda value: 1})
            .to(scene.queen.queue(target))
        )

        async def produce(size: int) -> None:
            async with scene.new_client(scene.url) as client:
                for _ in range(20):
                    await client.queue(source).push([{"data": {"at": 1000}}] * size)

        async with _running(scene, stream, batch_size=250):
            await asyncio.gather(*(produce(size) for size in (3, 60) * 4))
            await scene.queen.queue(source).push([{"data": {"at": FAR_AWAY_MS}}])
            (one,) = await _drain(scene, target, 1)
        assert one["count"] == 4 * 20 * (3 + 60)
        await _nothing_more(scene, target)


@scenario(seconds=40)
async def a_stream_that_stops_goes_on_where_it_was(scene: Scene) -> None:
    async with scene.queue("in") as source, scene.queue("out") as target:
        stream = (
            Stream.from_(scene.queen.queue(source))
            .window_tumbling(seconds=10, event_time=_at)
            .reduce(lambda total, value: total + value["n"], 0)
            .to(scene.queen.queue(target))
        )
        for first in (0, 50):
            await scene.queen.queue(source).push([{"data": {"at": n * 10, "n": 1}} for n in range(first, first + 50)])
            async with _running(scene, stream) as runner:
                await _has_read(runner, 50)
        await scene.queen.queue(source).push([{"data": {"at": FAR_AWAY_MS, "n": 1}}])
        async with _running(scene, stream):
            assert await _drain(scene, target, 1) == [{"value": 100}]
        await _nothing_more(scene, target)


@scenario()
async def windows_slide(scene: Scene) -> None:
    async with scene.queue("in") as source, scene.queue("out") as target:
        await scene.queen.queue(source).push([{"data": {"at": at}} for at in (10_500, 11_500, FAR_AWAY_MS)])
        stream = (
            Stream.from_(scene.queen.queue(source))
            .window_sliding(size=3, slide=1, event_time=_at)
            .aggregate({"count": lambda value: 1})
            .map(_with_window)
            .to(scene.queen.queue(target))
        )
        async with _running(scene, stream):
            emitted = await _drain(scene, target, 4)
        assert {one["start"]: one["count"] for one in emitted} == {8000: 1, 9000: 2, 10_000: 2, 11_000: 1}


@scenario()
async def sessions_end_after_a_gap_or_when_idle(scene: Scene) -> None:
    async with scene.queue("in") as source, scene.queue("out") as target:
        stream = (
            Stream.from_(scene.queen.queue(source))
            .key_by(_key)
            .window_session(gap=1, idle_flush_ms=200)
            .aggregate({"count": lambda value: 1})
            .map(_with_window)
            .to(scene.queen.queue(target))
        )
        async with _running(scene, stream):
            await scene.queen.queue(source).push([{"data": {"k": key}} for key in "aab"])
            first = await _drain(scene, target, 2)
            await scene.queen.queue(source).push([{"data": {"k": "a"}}])
            second = await _drain(scene, target, 1)
        assert {one["k"]: one["count"] for one in first} == {"a": 2, "b": 1}
        assert [(one["k"], one["count"]) for one in second] == [("a", 1)]


@scenario()
async def cron_windows_are_on_the_clock_and_flushed_when_idle(scene: Scene) -> None:
    async with scene.queue("in") as source, scene.queue("out") as target:
        await scene.queen.queue(source).push([{"data": {"n": n}} for n in range(3)])
        stream = (
            Stream.from_(scene.queen.queue(source))
            .window_cron(every="second", idle_flush_ms=200)
            .aggregate({"count": lambda value: 1})
            .map(_with_window)
            .to(scene.queen.queue(target))
        )
        async with _running(scene, stream):
            (one,) = await _drain(scene, target, 1)
        assert one["count"] == 3
        assert one["start"] % 1000 == 0


@scenario()
async def late_events_are_dropped_included_or_waited_for(scene: Scene) -> None:
    async with scene.queue("in") as source, scene.queue("out") as target:
        for name, options, expected in (
            ("drop", {}, [1, 1]),
            ("include", {"on_late": "include"}, [1, 1, 1]),
            ("lateness", {"allowed_lateness": 60}, [2, 1]),
        ):
            stream = (
                Stream.from_(scene.queen.queue(source))
                .window_tumbling(seconds=10, event_time=_at, **options)
                .aggregate({"count": lambda value: 1})
                .to(scene.queen.queue(target))
            )
            async with _running(scene, stream, name, subscription_mode="new") as runner:
                # The group exists from its first pop on.
                await asyncio.sleep(0.4)
                for position, at in enumerate((0, 30_000, 5000, FAR_AWAY_MS), 1):
                    await scene.queen.queue(source).push([{"data": {"at": at}}])
                    await _has_read(runner, position)
                emitted = await _drain(scene, target, len(expected))
            assert [one["count"] for one in emitted] == expected, name
            assert runner.metrics()["lateEventsTotal"] == (1 if name == "drop" else 0)


@scenario()
async def a_changed_chain_is_refused_until_it_is_reset(scene: Scene) -> None:
    async with scene.queue("in") as source:
        plain = Stream.from_(scene.queen.queue(source)).foreach(lambda value: None)
        changed = Stream.from_(scene.queen.queue(source)).map(lambda message: message).foreach(lambda value: None)
        async with _running(scene, plain):
            pass
        try:
            await changed.run(scene.queue_name("query"), scene.url)
        except Exception as error:
            assert "config_hash mismatch" in str(error), error
            assert getattr(error, "code", "") == "STREAMS_CONFIG_HASH_MISMATCH"
        else:
            raise AssertionError("another chain took over the query")
        async with _running(scene, changed, reset=True):
            pass


@scenario(seconds=40)
async def a_gate_holds_back_and_keeps_the_order(scene: Scene) -> None:
    async with scene.queue("in", lease_time=1) as source, scene.queue("out") as target:
        await scene.queen.queue(source).push([{"data": {"n": n}} for n in range(12)])
        stream = (
            Stream.from_(scene.queen.queue(source))
            .gate(token_bucket_gate(capacity=5, refill_per_sec=5))
            .to(scene.queen.queue(target))
        )
        begun = time.monotonic()
        async with _running(scene, stream) as runner:
            emitted = await _drain(scene, target, 12)
        assert [one["n"] for one in emitted] == list(range(12))
        assert time.monotonic() - begun > 1
        # A message whose lease has ended on a busy machine is let through once more, and emitted once.
        assert runner.metrics()["gateAllowsTotal"] >= 12


@scenario()
async def two_streams_on_one_source_each_see_everything(scene: Scene) -> None:
    async with scene.queue("in") as source, scene.queue("a") as first, scene.queue("b") as second:
        await scene.queen.queue(source).push([{"data": {"n": n}} for n in range(100)])
        streams = [Stream.from_(scene.queen.queue(source)).to(scene.queen.queue(target)) for target in (first, second)]
        async with _running(scene, streams[0], "one"), _running(scene, streams[1], "two"):
            for target in (first, second):
                assert [one["n"] for one in await _drain(scene, target, 100)] == list(range(100))
