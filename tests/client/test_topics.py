"""The client's grammar for topics, against a real server."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest

from queen import (
    BadRequestError,
    DeadLetterError,
    LeaseLostError,
    NotFoundError,
    OverloadedError,
    Queen,
    QueenConnectionError,
    QueenSync,
    TopicItem,
)
from tests.client.conftest import MakeClient, url_of
from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.proxy import TcpProxy


def values(items: list[TopicItem]) -> list[Any]:
    return [item["data"] for item in items]


async def left(queen: Queen, topic: str = "t") -> list[Any]:
    """What is ready, in the order of service."""
    return values(await queen.topic("ns", topic).peek(100))


async def test_items_are_served_by_priority_and_not_before_their_time(queen: Queen) -> None:
    topic = queen.topic("ns", "t")
    await topic.priority(5).enqueue(["late", {"data": "first", "priority": -1}])
    await queen.topic("ns", "t").delay(3600).enqueue("in an hour")
    await queen.topic("ns", "t").deliver_after(datetime.now(UTC) + timedelta(hours=2)).enqueue("in two")
    await queen.topic("ns", "t").enqueue({"no": "wrapping"})
    assert values(await queen.topic("ns", "t").batch(10).dequeue()) == ["first", {"no": "wrapping"}, "late"]
    assert values(await queen.topic("ns", "t").peek(delayed=True)) == ["in an hour", "in two"]
    counts = await queen.topic("ns", "t").counts()
    assert counts is not None
    assert (counts["ready"], counts["delayed"], counts["leased"], counts["dead"]) == (0, 2, 3, 0)


async def test_bytes_and_metadata_come_back_as_they_went(queen: Queen) -> None:
    sentence = queen.topic("ns", "t").metadata({"from": "here"}).ttl(60)
    await sentence.enqueue([b"\x00\xff", {"payload": b"two", "metadata": {"own": 1}, "ttl": 30}])
    first, second = await queen.topic("ns", "t").batch(2).dequeue()
    assert (first["payload"], first["metadata"]) == (b"\x00\xff", {"from": "here"})
    assert (second["payload"], second["metadata"]) == (b"two", {"own": 1})
    assert first["expires_at"] is not None
    assert "data" not in first


async def test_one_key_is_one_item(queen: Queen) -> None:
    first = await queen.topic("ns", "t").idempotency_key("k").enqueue("once")
    again = await queen.topic("ns", "t").idempotency_key("k").enqueue("twice")
    assert first == again
    assert await left(queen) == ["once"]
    with pytest.raises(ValueError, match="cannot share one idempotency key"):
        await queen.topic("ns", "t").idempotency_key("k").enqueue([1, 2])


async def test_what_cannot_be_an_item_is_refused_here(queen: Queen) -> None:
    topic = queen.topic("ns", "t")
    with pytest.raises(ValueError, match="prioritee"):
        await topic.enqueue({"data": 1, "prioritee": 2})
    with pytest.raises(TypeError, match="must be bytes"):
        await topic.enqueue({"payload": "text"})
    with pytest.raises(ValueError, match="no time zone"):
        topic.deliver_after(datetime(2030, 1, 1))
    with pytest.raises(ValueError, match="no time zone"):
        await topic.enqueue({"data": 1, "deliver_after": datetime(2030, 1, 1)})
    with pytest.raises(ValueError, match="needs exactly one topic"):
        await queen.topic("ns").enqueue(1)
    with pytest.raises(ValueError, match="does not say which topic"):
        await queen.topic("ns", "a", "b").ack(7)
    assert await topic.enqueue([]) == []
    with pytest.raises(BadRequestError, match="priority"):
        await queen.topic("ns", "t").priority(2**40).enqueue(1)
    assert await queen.topics("ns") == []


async def test_ack_nack_extend_and_release(queen: Queen) -> None:
    topic = queen.topic("ns", "t")
    await topic.configure(backoff_base_ms=3_600_000, backoff_cap_ms=3_600_000)
    await topic.enqueue([1, 2, 3, 4])
    one, two, three, four = await queen.topic("ns", "t").batch(4).lease(60).dequeue()
    await topic.ack(one)
    failed = await topic.nack(two, "no room")
    assert failed["dlq"] is False
    assert failed["retry_in_seconds"] > 0
    until_when = await topic.extend(three, 600)
    assert three["lease_expires_at"] is not None
    assert datetime.fromisoformat(until_when) > datetime.fromisoformat(three["lease_expires_at"])
    assert len(await topic.extend([three, four])) == 2
    await topic.release([three, four])
    assert await left(queen) == [3, 4]
    [back] = await queen.topic("ns", "t").dequeue()
    assert (back["data"], back["retries"], back["last_error"]) == (3, 0, None)
    for settle in (topic.ack, topic.nack, topic.extend, topic.release):
        with pytest.raises(LeaseLostError, match="not leased") as lost:
            await settle([four, back])
        assert lost.value.ids[0] == four["id"]


async def test_what_fails_for_good_is_not_retried(queen: Queen) -> None:
    topic = queen.topic("ns", "t")
    await topic.enqueue(["bad", "worse"])
    (bad,) = await topic.dequeue()
    assert (await topic.nack(bad, "invalid", dlq=True))["dlq"] is True

    async def refuse(_: Any) -> None:
        raise DeadLetterError("no such order")

    await queen.topic("ns", "t").limit(1).consume(refuse)
    assert [letter["last_error"] for letter in await topic.dlq().get()] == ["invalid", "no such order"]

    await queen.queue("q").push([{"data": 1}])
    await queen.queue("q").limit(1).consume(refuse)
    (message,) = (await queen.queue("q").dlq().get())["messages"]
    assert message["errorMessage"] == "no such order"


async def test_topics_are_listed_configured_purged_and_deleted(queen: Queen) -> None:
    await queen.topic("ns", "a").enqueue(1)
    await queen.topic("ns", "b/c d").enqueue([1, 2])
    assert sorted(await queen.topics("ns")) == ["a", "b/c d"]
    options = await queen.topic("ns", "b/c d").configure(max_retries=7)
    assert options["max_retries"] == 7
    assert await queen.topic("ns", "b/c d").purge() == 2
    assert await queen.topics("ns") == ["a"]
    assert await queen.topic("ns", "a").delete() is True
    assert await queen.topic("ns", "a").delete() is False
    assert await queen.topic("ns", "a").counts() is None
    with pytest.raises(BadRequestError, match="colour"):
        await queen.topic("ns", "a").configure(colour=1)


async def test_dead_letters_are_listed_retried_and_deleted(queen: Queen) -> None:
    topic = queen.topic("ns", "t")
    await topic.configure(max_retries=0)
    await topic.enqueue([1, 2, 3])

    async def fail(item: TopicItem) -> None:
        raise ValueError(f"not {item['data']}")

    await queen.topic("ns", "t").limit(3).consume(fail)
    letters = await topic.dlq().get()
    assert [(letter["data"], letter["last_error"]) for letter in letters] == [
        (n, f"ValueError: not {n}") for n in (1, 2, 3)
    ]
    assert await topic.dlq().retry(letters[1]) == 1
    assert await left(queen) == [2]
    assert await topic.dlq().limit(1).delete() == 1
    with pytest.raises(NotFoundError, match="Dead letter not found"):
        await topic.dlq().delete(letters[:2])
    assert values(await topic.dlq().offset(0).get()) == [3]


async def test_handler_gets_items_lists_or_items_of_lists(queen: Queen) -> None:
    got: list[Any] = []

    async def one(item: TopicItem) -> None:
        got.append(item["data"])

    def many(items: list[TopicItem]) -> None:
        got.append(values(items))

    await queen.topic("ns", "t").enqueue([1, 2, 3, 4, 5, 6])
    await queen.topic("ns", "t").limit(1).consume(one)
    await queen.topic("ns", "t").batch(2).limit(3).consume(many)
    await queen.topic("ns", "t").batch(10).each().idle_millis(500).consume(one)
    assert got == [1, [2, 3], [4], 5, 6]
    assert await queen.topics("ns") == []


async def test_item_that_fails_is_retried_and_does_not_hold_back_others(queen: Queen) -> None:
    await queen.topic("ns", "t").configure(backoff_base_ms=1)
    await queen.topic("ns", "t").enqueue(["good", "bad", "fine"])
    calls: list[tuple[str, int]] = []

    async def handle(item: TopicItem) -> None:
        calls.append((item["data"], item["retries"]))
        if item["data"] == "bad" and item["retries"] < 2:
            raise ValueError("not yet")

    await queen.topic("ns", "t").batch(3).each().limit(5).consume(handle)
    assert calls[:3] == [("good", 0), ("bad", 0), ("fine", 0)]
    assert calls[3:] == [("bad", 1), ("bad", 2)]
    assert await queen.topics("ns") == []


async def test_slow_handler_keeps_its_lease(queen: Queen) -> None:
    await queen.topic("ns", "t").enqueue("slow")
    others: list[TopicItem] = []

    async def handle(item: TopicItem) -> None:
        others.extend(await queen.topic("ns", "t").timeout_millis(2500).dequeue())

    await queen.topic("ns", "t").lease(1).limit(1).consume(handle)
    assert others == []
    assert await queen.topics("ns") == []


async def test_slow_handler_without_renewal_loses_its_item_to_another(
    queen: Queen, caplog: pytest.LogCaptureFixture
) -> None:
    await queen.topic("ns", "t").enqueue("slow")
    others: list[TopicItem] = []

    async def handle(item: TopicItem) -> None:
        others.extend(await queen.topic("ns", "t").timeout_millis(20_000).dequeue())

    await queen.topic("ns", "t").lease(0.5).renew_lease(False).limit(1).consume(handle)
    assert [(item["data"], item["retries"]) for item in others] == [("slow", 1)]
    assert "messages rejected" in caplog.text
    await queen.topic("ns", "t").ack(others)


async def test_cancelled_consumer_gives_its_items_back_and_they_have_not_failed(queen: Queen) -> None:
    await queen.topic("ns", "t").enqueue([1, 2, 3])
    begun = asyncio.Event()

    async def handle(items: list[TopicItem]) -> None:
        begun.set()
        await asyncio.Event().wait()

    consuming = asyncio.ensure_future(queen.topic("ns", "t").batch(2).lease(3600).consume(handle))
    await begun.wait()
    consuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consuming
    items = await queen.topic("ns", "t").batch(5).dequeue()
    assert [(item["data"], item["retries"]) for item in items] == [(1, 0), (2, 0), (3, 0)]


async def test_close_lets_handlers_finish_and_gives_back_the_rest(
    api: Api, queen: Queen, make_client: MakeClient
) -> None:
    await queen.topic("ns", "t").enqueue([1, 2, 3])
    closing = make_client(api.url)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def handle(item: TopicItem) -> None:
        begun.set()
        await go_on.wait()

    consuming = asyncio.ensure_future(closing.topic("ns", "t").batch(3).each().lease(3600).consume(handle))
    await begun.wait()
    ending = asyncio.create_task(closing.close())
    await asyncio.sleep(0)
    assert not ending.done()
    go_on.set()
    await ending
    await consuming
    assert await left(queen) == [2, 3]


async def test_stopping_consumer_that_waits_does_not_wait_out_its_poll(queen: Queen) -> None:
    stop = asyncio.Event()

    async def handle(item: TopicItem) -> None:
        raise AssertionError(item)

    consuming = asyncio.ensure_future(queen.topic("ns", "t").concurrency(3).consume(handle, signal=stop))
    await queen.request("GET", "/health")
    stop.set()
    async with asyncio.timeout(100):
        await consuming


async def test_consumer_goes_on_when_the_server_was_away(
    queen: Queen, make_client: MakeClient, wire: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    far = make_client(url_of(wire))
    got: list[Any] = []
    first = asyncio.Event()

    async def handle(item: TopicItem) -> None:
        got.append(item["data"])
        first.set()

    await queen.topic("ns", "t").enqueue(0)
    consuming = asyncio.ensure_future(far.topic("ns", "t").limit(2).consume(handle))
    await first.wait()
    async with wire.away():
        await queen.topic("ns", "t").enqueue("last")
        await until(lambda: "fetch failed" in caplog.text or "ack of" in caplog.text)
    await asyncio.wait_for(consuming, 60)
    assert got == [0, "last"]
    assert await queen.topics("ns") == []


async def test_server_that_is_replaced_while_items_are_handled_loses_and_repeats_nothing(
    start_server: StartServer, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    serving = [await start_server()]

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        where = urlsplit(serving[-1].url)
        return await asyncio.open_connection(where.hostname, where.port)

    wire = TcpProxy(connect)
    await wire.start()
    queen = make_client(url_of(wire))
    await queen.topic("ns", "t").enqueue(list(range(20)))
    handled: list[int] = []
    half, back, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(items: list[TopicItem]) -> None:
        handled.extend(values(items))
        if len(handled) == 10:
            half.set()
            await back.wait()
        if len(handled) == 20:
            done.set()

    consuming = asyncio.ensure_future(queen.topic("ns", "t").batch(5).lease(3600).consume(handle, signal=done))
    await half.wait()
    async with wire.away():
        back.set()
        await until(lambda: "ack of" in caplog.text)
        serving.append(await start_server(worker_id=1))
    await asyncio.wait_for(consuming, 60)
    assert handled == list(range(20))
    assert await queen.topics("ns") == []
    await queen.close()
    await wire.stop()


async def test_enqueue_whose_answer_is_lost_is_stored_once(
    queen: Queen, make_client: MakeClient, wire: TcpProxy
) -> None:
    far = make_client(url_of(wire))
    assert len(await far.topic("ns", "t").enqueue("warm")) == 1
    for _ in range(3):
        sending = asyncio.create_task(far.topic("ns", "t").enqueue("once"))
        wire.cut()
        await sending
    assert await left(queen) == ["warm", "once", "once", "once"]


async def test_enqueue_without_keys_is_tried_once(make_client: MakeClient, wire: TcpProxy) -> None:
    far = make_client(url_of(wire))
    async with wire.away():
        with pytest.raises(QueenConnectionError):
            await far.topic("ns", "t").idempotency_key(None).enqueue("maybe")


async def test_quota_is_an_overload_that_says_when_to_come_back(api: Api, make_client: MakeClient) -> None:
    queen = make_client(api.url, retry_attempts=1)
    await queen.request("PUT", "/api/v1/topics/quotas", {"namespace": "ns", "per_minute": 1})
    await queen.topic("ns", "t").enqueue(1)
    with pytest.raises(OverloadedError) as refused:
        await queen.topic("ns", "t").enqueue(2)
    assert refused.value.status == 429
    assert refused.value.retry_after is not None


async def test_transaction_mixes_topics_and_queues(queen: Queen) -> None:
    await queen.topic("ns", "t").enqueue("job")
    await queen.queue("q").push({"data": "message"})
    [item] = await queen.topic("ns", "t").dequeue()
    [message] = await queen.queue("q").pop()
    work = queen.transaction().topic("ns", "t").ack(item).ack(message)
    await work.topic("ns", "next").priority(3).enqueue(["a", b"b"]).queue("out").push({"data": "c"}).commit()
    first, second = await queen.topic("ns", "next").batch(2).dequeue()
    assert (first["data"], first["priority"], second["payload"]) == ("a", 3, b"b")
    assert [one["data"] for one in await queen.queue("out").pop()] == ["c"]
    assert await queen.topics("ns") == ["next"]
    with pytest.raises(LeaseLostError, match="not leased"):
        await queen.transaction().topic("ns", "t").ack(item).topic("ns", "next").enqueue("never").commit()
    assert await left(queen, "next") == []


async def test_schedule_enqueues_each_tick_once_however_many_run_it(
    api: Api, queen: Queen, make_client: MakeClient
) -> None:
    stop = asyncio.Event()
    clients = [make_client(api.url) for _ in range(4)]
    running = [
        asyncio.ensure_future(
            client.topic("ns", "t").priority(2).schedule("* * * * *", {"tidy": True}, catch_up=120, signal=stop)
        )
        for client in clients
    ]
    await queen.request("GET", "/health")
    await enqueued(queen, 3)
    stop.set()
    await asyncio.gather(*running)
    items = await queen.topic("ns", "t").peek(100, delayed=True)
    ticks = [datetime.fromisoformat(item["deliver_after"]) for item in items]
    assert len(set(ticks)) == len(ticks)
    assert all(one.second == one.microsecond == 0 for one in ticks)
    assert {later - earlier for earlier, later in itertools.pairwise(ticks)} == {timedelta(minutes=1)}
    assert all((item["priority"], item["data"]) == (2, {"tidy": True}) for item in items)
    assert max(ticks) - datetime.now(UTC) <= timedelta(minutes=1)


async def enqueued(queen: Queen, count: int) -> None:
    """Wait until a topic has so many items, due or not."""
    async with asyncio.timeout(100):
        while True:
            if len(await queen.topic("ns", "t").peek(100, delayed=True)) >= count:
                return
            await asyncio.sleep(0.05)


async def test_schedule_keeps_the_time_of_day_of_its_zone_and_says_when_it_ticks(queen: Queen) -> None:
    schedule = queen.topic("ns", "t").schedule("0 9 * * *", timezone="Europe/Berlin")
    before = datetime(2026, 3, 28, 12, tzinfo=UTC)
    assert [tick.astimezone(UTC).hour for tick in schedule.next(1, datetime(2026, 3, 27, tzinfo=UTC))] == [8]
    assert [tick.astimezone(UTC).hour for tick in schedule.next(2, before)] == [7, 7]


async def test_schedule_outlives_an_absence_of_the_server(
    queen: Queen, make_client: MakeClient, wire: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    far = make_client(url_of(wire), retry_attempts=1)
    stop = asyncio.Event()
    async with wire.away():
        running = asyncio.ensure_future(far.topic("ns", "t").schedule("* * * * *", catch_up=60, signal=stop))
        await until(lambda: "enqueue of tick" in caplog.text)
    await enqueued(queen, 2)
    stop.set()
    await asyncio.wait_for(running, 60)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ({"cron": "every day"}, "not a cron expression"),
        ({"cron": "0 0 30 2 *"}, "day-of-month"),
        ({"cron": "* * * * *", "timezone": "Mars/Olympus"}, "not a time zone"),
        ({"cron": "* * * * *", "catch_up": 1e6}, "catch_up must be"),
    ],
)
async def test_schedule_that_cannot_be_is_refused_at_once(queen: Queen, words: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        queen.topic("ns", "t").schedule(**words)
    with pytest.raises(ValueError, match="remove them"):
        queen.topic("ns", "t").delay(5).schedule("* * * * *")


async def test_grammar_is_the_same_without_await(api: Api) -> None:
    def script() -> None:
        got: list[Any] = []
        with QueenSync(api.url) as queen:
            topic = queen.topic("ns", "t")
            assert topic.configure(max_retries=0)["max_retries"] == 0
            assert len(topic.priority(1).enqueue([1, 2, 3, 4, 5, 6])) == 6
            one, two, three, four = queen.topic("ns", "t").batch(4).lease(60).dequeue()
            topic.ack(one)
            assert topic.nack(two, "bad")["dlq"] is True
            assert topic.extend(three)
            topic.release(three)
            queen.transaction().topic("ns", "t").ack(four).topic("ns", "u").enqueue("moved").commit()
            assert values(topic.peek()) == [3, 5, 6]
            assert values(topic.dlq().limit(5).get()) == [2]
            assert topic.dlq().retry() == 1
            queen.topic("ns", "t").limit(4).consume(lambda item: got.append(item["data"]))
            assert sorted(got) == [2, 3, 5, 6]
            counts = topic.counts()
            assert counts is not None
            assert counts["leased"] == 0
            assert queen.topics("ns") == ["u"]
            assert topic.purge() == 0
            assert topic.delete() is True
            with pytest.raises(ValueError, match="not a cron expression"):
                topic.schedule("never")

    await asyncio.to_thread(script)
