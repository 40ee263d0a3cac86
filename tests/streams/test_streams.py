"""Streams against a real server."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest

from queen import Queen
from queen.streams import (
    HttpBroker,
    PopRequest,
    Runner,
    Stream,
    StreamsConfigHashMismatch,
    StreamsHttpError,
    sliding_window_gate,
    token_bucket_gate,
)
from queen.streams.records import Message
from tests.conftest import StartServer
from tests.streams.collecting import drain, running
from tests.streams.counting import counting, counts, events, truth
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.database import Connection


async def push_events(api: Api, partitions: int, rounds: int) -> Counter[tuple[str, int]]:
    """Push what is to be counted; returns what it has to come to."""
    pushed = events(partitions, rounds)
    for partition, several in pushed.items():
        await api.push("in", *several, partition=partition)
    return truth(pushed.values())


async def test_a_stream_without_state_moves_messages(api: Api) -> None:
    await api.push("in", *({"n": n} for n in range(10)))
    stream = Stream.from_("in").filter(lambda m: m["data"]["n"] % 2).map(lambda m: {"n": m["data"]["n"] * 10}).to("out")
    async with running(stream, "evens", api.url) as runner:
        assert await drain(api, "out", 5) == [{"n": n} for n in (10, 30, 50, 70, 90)]
        await api.push("in", {"n": 11})
        assert await drain(api, "out", 1) == [{"n": 110}]
    metrics = runner.metrics()
    assert metrics["messagesTotal"] == 11
    assert metrics["pushItemsTotal"] == 6
    assert metrics["errorsTotal"] == 0
    assert metrics["lastCycleAt"] is not None
    assert metrics["queryId"] == "evens"
    assert metrics["serverQueryId"] is not None
    assert await api.pop("in", consumerGroup="streams.evens") == []


async def test_windows_count_exactly_over_partitions_and_restarts(api: Api) -> None:
    expected = await push_events(api, partitions=5, rounds=40)
    emitted: list[Any] = []
    for _ in range(3):
        async with running(counting(), "counts", api.url, batch_size=7, max_partitions=2) as runner:
            await until(lambda: runner.metrics()["cyclesTotal"] >= 3)
    async with running(counting(), "counts", api.url):
        emitted += await drain(api, "out", len(expected))
    assert counts(emitted) == expected
    assert await api.pop("out") == []


async def test_two_runners_of_one_query_share_its_partitions(start_server: StartServer) -> None:
    one = await start_server(0, num_workers=2)
    other = await start_server(1, num_workers=2)
    expected = await push_events(one, partitions=6, rounds=60)
    options = {"batch_size": 11, "max_partitions": 2}
    async with (
        running(counting(), "shared", one.url, **options) as first,
        running(counting(), "shared", other.url, **options) as second,
    ):
        emitted = await drain(one, "out", len(expected), seconds=40)
        await until(lambda: first.metrics()["messagesTotal"] + second.metrics()["messagesTotal"] == 6 * (120 + 1))
    assert counts(emitted) == expected
    assert first.metrics()["messagesTotal"] > 0
    assert second.metrics()["messagesTotal"] > 0
    assert await one.pop("out") == []


async def test_two_runners_and_their_idle_flushes_emit_every_window_once(api: Api) -> None:
    """Windows of a tenth of a second, by processing time, flushed by any of the runners."""
    stream = (
        Stream.from_("in")
        .window_tumbling(seconds=0.1, idle_flush_ms=30)
        .aggregate({"count": lambda value: 1})
        .to("out")
    )
    async with running(stream, "flushes", api.url), running(stream, "flushes", api.url):
        for number in range(150):
            await api.push("in", number, partition=f"p{number % 3}")
        total, emitted = 0, []
        while total < 150:
            emitted += await drain(api, "out", 1)
            total = sum(one["count"] for one in emitted)
        await asyncio.sleep(0.3)
        assert await api.pop("out") == []
    assert total == 150


async def test_an_idle_partition_is_flushed_by_the_runner_that_starts_after_a_crash(api: Api) -> None:
    """Nothing arrives any more; the one that starts knows from the server what is open."""
    stream = Stream.from_("in").window_tumbling(seconds=0.5, idle_flush_ms=1500).reduce(lambda a, v: a + v, 0).to("out")
    async with running(stream, "idle", api.url) as runner:
        await api.push("in", 1, 2, 3)
        await until(lambda: runner.metrics()["messagesTotal"] == 3)
    async with running(stream, "idle", api.url) as runner:
        assert await drain(api, "out", 1) == [{"value": 6}]
        assert runner.metrics()["flushCyclesTotal"] == 1
        assert runner.metrics()["messagesTotal"] == 0


async def test_sessions_end_when_a_key_is_quiet(api: Api) -> None:
    stream = (
        Stream.from_("in")
        .key_by(lambda message: message["data"]["k"])
        .window_session(gap=0.3, idle_flush_ms=50)
        .aggregate({"count": lambda value: 1})
        .map(lambda value, context: {"k": context["key"], **value})
        .to("out")
    )
    async with running(stream, "sessions", api.url):
        await api.push("in", {"k": "a"}, {"k": "b"}, {"k": "a"})
        first = await drain(api, "out", 2)
        await api.push("in", {"k": "a"})
        second = await drain(api, "out", 1)
    assert sorted((one["k"], one["count"]) for one in first) == [("a", 2), ("b", 1)]
    assert [(one["k"], one["count"]) for one in second] == [("a", 1)]


async def test_cron_windows_close_on_the_clock(api: Api) -> None:
    stream = (
        Stream.from_("in")
        .window_cron(every="second", idle_flush_ms=100)
        .aggregate({"count": lambda value: 1})
        .map(lambda value, context: {"start": context["windowStart"], "end": context["windowEnd"], **value})
        .to("out")
    )
    async with running(stream, "cron", api.url):
        await api.push("in", 1, 2, 3)
        (one,) = await drain(api, "out", 1)
    assert (one["count"], one["start"] % 1000, one["end"] - one["start"]) == (3, 0, 1000)


async def test_late_events_are_dropped_or_included(api: Api) -> None:
    times = [0, 30_000, 5000, 60_000]
    for on_late, sums in (("drop", [1, 1]), ("include", [1, 1, 1])):
        stream = counting(on_late=on_late)
        query = f"late-{on_late}"
        async with running(stream, query, api.url) as runner:
            for position, at in enumerate(times):
                await api.push("in", {"k": "a", "at": at, "n": 1})
                await until(partial(_has_read, runner, position + 1))
            emitted = await drain(api, "out", len(sums))
        assert [one["count"] for one in emitted] == sums
        assert runner.metrics()["lateEventsTotal"] == (1 if on_late == "drop" else 0)
        assert await api.pop("out") == []
        await api.call("DELETE", "/api/v1/resources/queues/in")


def _has_read(runner: Runner, messages: int) -> bool:
    return bool(runner.metrics()["messagesTotal"] == messages)


async def test_a_changed_chain_is_refused_until_the_query_is_reset(api: Api) -> None:
    async with running(counting(), "changing", api.url):
        pass
    changed = counting(grace_period=5)
    with pytest.raises(StreamsConfigHashMismatch, match="config_hash mismatch") as caught:
        await changed.run("changing", api.url)
    assert caught.value.code == "STREAMS_CONFIG_HASH_MISMATCH"
    async with running(changed, "changing", api.url, reset=True):
        pass
    with pytest.raises(StreamsConfigHashMismatch):
        await counting().run("changing", api.url)


async def test_a_runner_of_the_old_chain_cannot_write_after_a_reset(api: Api, connection: Connection) -> None:
    errors: list[str] = []
    await api.push("in", {"k": "a", "at": 0, "n": 1})
    async with running(counting(), "old", api.url, on_error=lambda error, context: errors.append(str(error))) as old:
        await until(lambda: old.metrics()["cyclesTotal"] == 1)
        new = await counting(grace_period=5).run("old", api.url, reset=True, consumer_group="elsewhere")
        await new.stop()
        await api.push("in", {"k": "a", "at": 1000, "n": 1})
        await until(lambda: bool(errors))
    assert "config_hash mismatch" in errors[0]
    assert await connection.fetchval("SELECT count(*) FROM queen.stream_state WHERE key <> '__wm__'") == 0


async def test_two_queries_on_one_source_do_not_touch_each_other(api: Api) -> None:
    expected = await push_events(api, partitions=2, rounds=20)
    async with running(counting(), "one", api.url), running(counting(), "two", api.url):
        emitted = await drain(api, "out", 2 * len(expected))
    assert Counter((one["k"], one["start"], one["count"]) for one in emitted) == Counter(
        {(key, start, count): 2 for (key, start), count in expected.items()}
    )


async def test_a_token_bucket_holds_back_what_it_has_no_tokens_for(api: Api) -> None:
    await api.configure("in", leaseTime=1)
    await api.push("in", *({"n": n} for n in range(12)))
    stream = Stream.from_("in").gate(token_bucket_gate(capacity=5, refill_per_sec=5)).to("out")
    begun = time.monotonic()
    async with running(stream, "gate", api.url) as runner:
        emitted = await drain(api, "out", 12)
    assert [one["n"] for one in emitted] == list(range(12))
    assert time.monotonic() - begun > 1
    assert runner.metrics()["gateAllowsTotal"] == 12
    assert runner.metrics()["gateDenialsTotal"] > 0


async def test_a_sliding_window_gate_has_a_limit_for_each_key(api: Api) -> None:
    await api.push("in", *({"k": key, "n": n} for n in range(3) for key in "ab"))
    stream = (
        Stream.from_("in")
        .key_by(lambda message: message["data"]["k"])
        .gate(sliding_window_gate(limit=2, window_sec=3600))
        .to("out")
    )
    async with running(stream, "limit", api.url) as runner:
        emitted = await drain(api, "out", 4)
        await until(lambda: runner.metrics()["gateDenialsTotal"] > 0)
    assert [(one["k"], one["n"]) for one in emitted] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


async def test_a_function_that_fails_is_reported_and_its_batch_comes_again(api: Api) -> None:
    failures = 2
    reported: list[tuple[str, str]] = []

    def flaky(message: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise RuntimeError("not today")
        return message["data"]

    async def note(error: Exception, context: dict[str, Any]) -> None:
        reported.append((str(error), context["phase"]))
        raise ValueError("the hook fails too")

    await api.push("in", {"n": 1})
    async with running(Stream.from_("in").map(flaky).to("out"), "flaky", api.url, on_error=note) as runner:
        assert await drain(api, "out", 1) == [{"n": 1}]
    assert reported == [("not today", "cycle")] * 2
    assert runner.metrics()["errorsTotal"] == 2
    assert runner.metrics()["lastError"] == "not today"


async def test_a_stream_waits_for_a_server_that_is_away(api: Api) -> None:
    errors: list[str] = []

    class Flaky(HttpBroker):
        async def pop(self, queue: str, request: PopRequest) -> list[Message]:
            if len(errors) < 2:
                raise StreamsHttpError("not answered")
            return await super().pop(queue, request)

    await api.push("in", {"n": 1})
    broker = Flaky(api.url)
    runner = (
        await Stream.from_("in")
        .to("out")
        .run("away", broker=broker, on_error=lambda error, context: errors.append(context["phase"]))
    )
    assert await drain(api, "out", 1) == [{"n": 1}]
    await runner.stop()
    await runner.stop()
    await broker.close()
    assert errors == ["pop", "pop"]


async def test_a_server_that_is_not_there_or_refuses_is_an_error_at_the_start(api: Api) -> None:
    broker = HttpBroker("http://127.0.0.1:1", retry_attempts=1)
    with pytest.raises(StreamsHttpError, match="queries failed"):
        await Stream.from_("in").to("out").run("q", broker=broker)
    await broker.close()
    with pytest.raises(StreamsHttpError) as caught:
        await Stream.from_("in").to("out").run("q\n", api.url)
    assert caught.value.status == 400
    with pytest.raises(ValueError, match="requires the url"):
        await Stream.from_("in").run("q")
    with pytest.raises(ValueError, match="query_id"):
        await Stream.from_("in").run("", api.url)


async def test_a_stream_begins_at_the_given_offsets(api: Api) -> None:
    await api.push("in", {"n": 1})
    stream = Stream.from_("in").to("out")
    assert api.worker is not None
    popper = api.worker.broker.popper
    async with running(stream, "new", api.url, subscription_mode="new") as runner:
        await until(lambda: popper.parked > 0)
        await api.push("in", {"n": 2})
        assert await drain(api, "out", 1) == [{"n": 2}]
    assert runner.metrics()["messagesTotal"] == 1
    async with running(stream, "from", api.url, subscription_from="2020-01-01T00:00:00Z"):
        assert len(await drain(api, "out", 2)) == 2


class FluentQueue:
    """The least of a client's queue: what a stream calls when the client pops for it."""

    def __init__(self, api: Api, name: str) -> None:
        self._api = api
        self.queue_name = name
        self.asked: dict[str, Any] = {}

    def __getattr__(self, option: str) -> Any:
        def choose(value: Any) -> FluentQueue:
            self.asked[option] = value
            return self

        return choose

    async def pop(self) -> list[dict[str, Any]]:
        return await self._api.pop(
            self.queue_name,
            batch=self.asked["batch"],
            wait=True,
            timeout=self.asked["timeout_millis"],
            consumerGroup=self.asked["group"],
            partitions=self.asked["partitions"],
        )


async def test_a_client_s_queue_is_popped_through_the_client(api: Api) -> None:
    await api.push("in", {"n": 1})
    queue = FluentQueue(api, "in")
    stream = Stream.from_(queue).to(FluentQueue(api, "out"))
    async with running(stream, "client", api.url, consumer_group="mine", batch_size=5, subscription_mode="all"):
        assert await drain(api, "out", 1) == [{"n": 1}]
    assert queue.asked == {
        "batch": 5,
        "wait": True,
        "timeout_millis": 200,
        "group": "mine",
        "partitions": 4,
        "subscription_mode": "all",
    }


async def test_the_client_of_this_project_pops_for_its_streams(api: Api) -> None:
    async with Queen(api.url) as queen:
        await queen.queue("in").push([{"data": {"n": n}} for n in range(3)])
        async with running(Stream.from_(queen.queue("in")).to(queen.queue("out")), "own", api.url) as runner:
            assert await drain(api, "out", 3) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert runner.metrics()["errorsTotal"] == 0


async def test_a_token_is_sent(api: Api) -> None:
    broker = HttpBroker(api.url + "/", "secret")
    assert broker._headers["Authorization"] == "Bearer secret"
    await broker.close()
