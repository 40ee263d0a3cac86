"""Topics: order, delay, leases, retries, dead letters, idempotency."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from queen.broker.topics.batching import Links
from queen.storage.database import Record
from tests.conftest import StartServer
from tests.redis.redis_server import RedisServer
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.database import Connection
from tests.support.topic_api import NAMESPACE, TOPIC, TopicApi, b64, item, named, values


@pytest.fixture
def topics(api: Api) -> TopicApi:
    return TopicApi(api)


async def test_what_is_enqueued_comes_back_with_all_that_was_said_of_it(topics: TopicApi) -> None:
    sent = {
        "namespace": NAMESPACE,
        "topic": TOPIC,
        "payload": b64(b"\x00\xff bytes"),
        "metadata": {"trace": ["a", {"b": None}]},
        "priority": -7,
        "idempotency_key": "only-once",
        "deliver_after": "2026-01-02T03:04:05.678901Z",
    }
    (id,) = await topics.enqueue(sent)
    (got,) = await topics.dequeue(lease=60)
    assert got["id"] == id
    assert {key: got[key] for key in sent} == sent
    assert got["status"] == "leased"
    assert got["retries"] == 0
    assert got["first_failed_at"] is got["last_error"] is None
    lease = datetime.fromisoformat(got["lease_expires_at"]) - datetime.fromisoformat(got["updated_at"])
    assert timedelta(seconds=59) < lease < timedelta(seconds=61)
    assert await topics.ack(got) == [True]
    assert await topics.counts() == {"ready": 0, "delayed": 0, "leased": 0, "dead": 0}


async def test_json_values_come_back_as_they_were_sent(topics: TopicApi) -> None:
    payloads = [None, 0, "text", [1.5, {"a": {}}], {"ä": "😀"}, False]
    await topics.enqueue(*(item(payload) for payload in payloads))
    assert values(await topics.dequeue()) == payloads


async def test_items_are_served_by_priority_then_by_time_then_by_id(topics: TopicApi) -> None:
    early, late = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
    await topics.enqueue(
        item("f", priority=5),
        item("d", priority=2, deliver_after=late),
        item("c", priority=2, deliver_after=early),
        item("e", priority=2),
        item("a", priority=-1),
        item("b", priority=-1),
    )
    assert values(await topics.dequeue(4)) == ["a", "b", "c", "d"]
    await topics.enqueue(item("urgent", priority=-(2**31)))
    assert values(await topics.dequeue()) == ["urgent", "e", "f"]


async def test_an_item_of_one_request_is_served_in_the_order_of_the_request(topics: TopicApi) -> None:
    await asyncio.gather(*(topics.enqueue(*(item([n, m]) for m in range(50))) for n in range(20)))
    served = values(await topics.dequeue(1000))
    for n in range(20):
        assert [m for k, m in served if k == n] == list(range(50))


@pytest.mark.parametrize("many", [False, True])
async def test_an_item_that_becomes_due_during_the_search_for_the_next_one_is_not_missed(
    topics: TopicApi, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    real = Links.fetch

    async def slow(links: Links, name: str, *args: Any) -> list[Record]:
        if name == "topic_next_due":
            await asyncio.sleep(0.4)
        return await real(links, name, *args)

    monkeypatch.setattr(Links, "fetch", slow)
    await topics.enqueue(item("soon", delay=0.2))
    async with asyncio.timeout(100):
        path = "/dequeue/many" if many else "/dequeue"
        only = {} if many else {"topic": TOPIC}
        got = await topics.good("GET", path, namespace=NAMESPACE, wait=True, timeout=60_000, **only)
    assert values(got) == ["soon"]


async def test_a_delayed_item_is_never_early_and_wakes_waiting_dequeues(topics: TopicApi) -> None:
    due = datetime.now(UTC) + timedelta(seconds=3)
    await topics.enqueue(item("at", deliver_after=due.isoformat()), item("in", delay=1), item("never", delay=9999))
    (first,) = await topics.dequeue(limit=1, wait=True, timeout=60_000)
    assert first["data"] == "in"
    assert first["updated_at"] >= first["deliver_after"]
    (second,) = await topics.dequeue(wait=True, timeout=60_000)
    assert second["data"] == "at"
    assert datetime.fromisoformat(second["updated_at"]) >= due
    assert await topics.dequeue() == []
    assert await topics.counts() == {"ready": 0, "delayed": 1, "leased": 2, "dead": 0}


async def test_items_are_counted_by_priority_in_the_order_of_service(topics: TopicApi) -> None:
    where = {"namespace": NAMESPACE, "topic": TOPIC}
    assert await topics.good("GET", "/priorities", **where) == []
    await topics.enqueue(
        *(item(n, priority=5) for n in range(3)), item("first", priority=-1), item("late", priority=5, delay=9999)
    )
    await topics.dequeue(limit=2)
    assert await topics.good("GET", "/priorities", **where) == [
        {"priority": -1, "ready": 0, "delayed": 0, "leased": 1},
        {"priority": 5, "ready": 2, "delayed": 1, "leased": 1},
    ]
    assert len(await topics.good("GET", "/priorities", **where, limit=1)) == 1


async def test_a_dequeue_that_waits_is_answered_when_its_time_is_up(topics: TopicApi) -> None:
    begun = time.monotonic()
    assert await topics.dequeue(wait=True, timeout=200) == []
    assert time.monotonic() - begun > 0.19


async def test_an_item_that_becomes_more_urgent_later_overtakes(topics: TopicApi) -> None:
    waiting = asyncio.create_task(topics.dequeue(1, wait=True, timeout=60_000))
    await asyncio.sleep(0.1)
    await topics.enqueue(item("late", delay=5))
    await topics.enqueue(item("soon", delay=0.2))
    async with asyncio.timeout(100):
        assert values(await waiting) == ["soon"]


async def test_waiting_dequeues_share_what_comes(topics: TopicApi) -> None:
    waiting = [asyncio.create_task(topics.dequeue(2, wait=True, timeout=60_000)) for _ in range(5)]
    await asyncio.sleep(0.1)
    await topics.enqueue(*(item(n) for n in range(10)))
    async with asyncio.timeout(100):
        served = [values(items) for items in await asyncio.gather(*waiting)]
    assert sorted(served) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


async def test_a_lease_that_lapses_makes_the_item_ready_with_one_retry_less(topics: TopicApi) -> None:
    await topics.configure(max_retries=1)
    await topics.enqueue(item("x"))
    (first,) = await topics.dequeue(lease=0.2)
    (again,) = await topics.dequeue(wait=True, timeout=60_000, lease=0.2)
    assert (again["id"], again["retries"]) == (first["id"], 1)
    assert again["lease_owner"] != first["lease_owner"]
    assert again["last_error"] and again["first_failed_at"]
    assert await topics.dequeue(wait=True, timeout=700) == []

    async def is_dead() -> bool:
        return await topics.dead() != []

    await until(is_dead)
    (dead,) = await topics.dead()
    assert (dead["id"], dead["original_id"], dead["retries"]) == (first["id"], first["id"], 1)
    assert dead["status"] == "dead" and "lease" in dead["last_error"]
    assert dead["first_failed_at"] == again["first_failed_at"] and dead["moved_at"] > dead["first_failed_at"]


async def test_an_extended_lease_lasts(topics: TopicApi) -> None:
    await topics.enqueue(item("x"))
    (got,) = await topics.dequeue(lease=2)
    (extended,) = await topics.good("POST", "/extend", [named(got, seconds=30)])
    assert extended["success"] and extended["lease_expires_at"] > got["lease_expires_at"]
    assert await topics.dequeue(wait=True, timeout=2500) == []
    (shorter,) = await topics.good("POST", "/extend", [named(got, seconds=0.1)])
    assert shorter["lease_expires_at"] == extended["lease_expires_at"], "never earlier"
    assert await topics.ack(got) == [True]
    (late,) = await topics.good("POST", "/extend", named(got))
    assert not late["success"]


async def test_a_late_ack_counts_until_the_item_is_leased_again(topics: TopicApi) -> None:
    await topics.enqueue(item("x"), item("y"))
    x, y = await topics.dequeue(lease=0.1)
    await topics.until_ready(2)
    assert await topics.short("/ack", named(x, lease_owner=x["lease_owner"])) == 200
    (again,) = await topics.dequeue()
    assert again["id"] == y["id"]
    assert await topics.short("/ack", named(y, lease_owner=y["lease_owner"])) == 404
    assert await topics.short("/nack", named(y, lease_owner=y["lease_owner"])) == 404
    (late,) = await topics.good("POST", "/extend", named(y, lease_owner=y["lease_owner"]))
    assert not late["success"]
    assert await topics.short("/ack", named(again, lease_owner=again["lease_owner"])) == 200


async def test_what_is_not_leased_cannot_be_acked_and_what_is_acked_is_gone(topics: TopicApi) -> None:
    (id,) = await topics.enqueue(item("x"))
    ref = {"id": id, "namespace": NAMESPACE, "topic": TOPIC}
    for path in ("/ack", "/nack"):
        answer = await topics.api.call("POST", path, ref)
        assert answer.status == 404 and str(id) in answer.body["error"], answer
    (got,) = await topics.dequeue()
    assert await topics.ack(got, got) == [True, False]
    assert await topics.short("/ack", ref) == 404
    assert await topics.good("POST", "/ack", [ref | {"topic": "other"}, ref | {"id": "no id"}]) == [
        {"id": id, "success": False, "error": "Item not found or not leased"},
        {"id": 0, "success": False, "error": "Item not found or not leased"},
    ]


async def test_a_nacked_item_waits_longer_each_time_and_dies_at_last(topics: TopicApi) -> None:
    await topics.configure(backoff_base_ms=100, backoff_cap_ms=300)
    await topics.enqueue(item("x", metadata={"m": 1}, idempotency_key="k"))
    for longest in (0.1, 0.2, 0.3):
        (got,) = await topics.dequeue(wait=True, timeout=60_000)
        assert got["updated_at"] >= got["deliver_after"]
        (result,) = await topics.nack(got, error="it\x00broke")
        assert result["success"] and not result["dlq"]
        assert longest / 2 <= result["retry_in_seconds"] <= longest
    (got,) = await topics.dequeue(wait=True, timeout=60_000)
    assert got["updated_at"] >= got["deliver_after"]
    assert (got["retries"], got["last_error"]) == (3, "it\N{REPLACEMENT CHARACTER}broke")
    (result,) = await topics.nack(got, error="for good")
    assert result["dlq"]
    (dead,) = await topics.dead()
    assert (dead["data"], dead["last_error"], dead["retries"], dead["metadata"]) == ("x", "for good", 3, {"m": 1})
    assert await topics.enqueue(item("y", idempotency_key="k")) == [got["id"]], "the key is still taken"


async def test_a_nack_can_dead_letter_at_once(topics: TopicApi) -> None:
    await topics.enqueue(item("x"), item("y", priority=3))
    x, y = await topics.dequeue(limit=2)
    first, second = await topics.good("POST", "/nack", [named(x) | {"dlq": True, "error": "invalid"}, named(y)])
    assert (first["dlq"], second["dlq"]) == (True, False)
    (dead,) = await topics.dead()
    assert (dead["data"], dead["last_error"], dead["retries"]) == ("x", "invalid", 0)


async def test_a_dead_letter_is_sent_round_again_or_thrown_away(topics: TopicApi) -> None:
    await topics.configure(max_retries=0)
    await topics.enqueue(item("x"), item("y", priority=3))
    await topics.nack(*await topics.dequeue())
    x, y = await topics.dead()
    assert await topics.short("/dlq/retry", named(x)) == 200
    (got,) = await topics.dequeue()
    assert (got["id"], got["data"], got["retries"], got["last_error"]) == (x["id"], "x", 0, None)
    assert await topics.short("/dlq/retry", named(x)) == 404
    assert await topics.short("/dlq/delete", named(y)) == 200
    assert await topics.good("POST", "/dlq/delete", [named(y)]) == [
        {"id": y["id"], "success": False, "error": "Dead letter not found"}
    ]
    assert await topics.dead() == []


async def test_dead_letters_come_in_pages(topics: TopicApi) -> None:
    await topics.configure(max_retries=0)
    await topics.enqueue(*(item(n) for n in range(25)))
    for got in await topics.dequeue(25):
        await topics.nack(got)
    assert values(await topics.dead()) == list(range(10))
    assert values(await topics.dead(limit=10, offset=20)) == list(range(20, 25))


async def test_at_most_once_means_gone_when_given(topics: TopicApi) -> None:
    await topics.configure(at_most_once=True)
    await topics.enqueue(item("x"), item("y"))
    (got,) = await topics.dequeue(1)
    assert await topics.counts() == {"ready": 1, "delayed": 0, "leased": 0, "dead": 0}
    assert await topics.short("/ack", named(got)) == 404


async def test_an_item_past_its_ttl_is_not_delivered_and_is_removed(topics: TopicApi, connection: Connection) -> None:
    await topics.configure("short", ttl_seconds=1)
    await topics.enqueue(item("gone", ttl=0.1), item("stays"), item("later", ttl=60, delay=61))
    await topics.enqueue(item("own", topic="short", ttl=3600), item("topic's", topic="short"))

    async def lasting(count: int) -> bool:
        query = "SELECT count(*) <= $1 FROM queen.topic_items WHERE expires_at > clock_timestamp()"
        return bool(await connection.fetchval(query, count))

    await until(lambda: lasting(3))
    assert values(await topics.dequeue()) == ["stays"]
    await connection.execute(
        "UPDATE queen.topic_items SET created_at = created_at - interval '61 s',"
        " deliver_after = deliver_after - interval '61 s', expires_at = expires_at - interval '61 s'"
        " WHERE deliver_after > now()"
    )
    (later,) = await topics.dequeue()
    assert later["data"] == "later", "the time counts from when it is due"
    await until(lambda: lasting(2))
    assert values(await topics.dequeue(topic="short")) == ["own"]
    assert topics.api.worker is not None
    await topics.api.worker.broker.jobs.run_once()
    assert await connection.fetchval("SELECT count(*) FROM queen.topic_items WHERE leased_until IS NULL") == 0


async def test_one_key_from_50_clients_at_once_is_one_item(start_server: StartServer, connection: Connection) -> None:
    servers = [TopicApi(await start_server(worker_id=id, num_workers=2)) for id in range(2)]
    for attempt in range(5):
        asked = [
            servers[n % 2].enqueue(item(n, topic=f"t{n % 3}", idempotency_key=f"k{attempt}"), item("plain"))
            for n in range(50)
        ]
        ids = [ids[0] for ids in await asyncio.gather(*asked)]
        assert len(set(ids)) == 1
        assert await connection.fetchval("SELECT count(*) FROM queen.topic_items WHERE id = $1", ids[0]) == 1
    assert await connection.fetchval("SELECT count(*) FROM queen.topic_items") == 5 * 51


async def test_keys_are_per_namespace_and_outlive_their_items(topics: TopicApi, connection: Connection) -> None:
    first, again, other = [
        (await topics.enqueue(item("x", namespace=namespace, idempotency_key="k")))[0] for namespace in ("a", "a", "b")
    ]
    assert first == again != other
    two = await topics.enqueue(*(item(n, namespace="a", idempotency_key="twice") for n in range(2)))
    assert two[0] == two[1]
    await topics.ack(*await topics.dequeue(namespace="a"))
    assert await topics.enqueue(item("y", namespace="a", idempotency_key="k")) == [first]
    assert await topics.dequeue(namespace="a") == []
    assert topics.api.worker is not None
    await connection.execute("UPDATE queen.topic_keys SET created_at = created_at - interval '2 h'")
    await topics.api.worker.broker.jobs.run_once()
    assert [row["item_id"] for row in await connection.fetch("SELECT * FROM queen.topic_keys")] == [other], (
        "it is there"
    )
    (new,) = await topics.enqueue(item("y", namespace="a", idempotency_key="k"))
    assert new != first


async def test_ids_are_text_on_request(topics: TopicApi) -> None:
    numbers = await topics.enqueue(item("x"))
    texts = await topics.good("POST", "/enqueue", [item("y")], ids="string")
    assert all(isinstance(id, int) and id > 2**53 for id in numbers)
    (x, y) = await topics.good("GET", "/dequeue", namespace=NAMESPACE, topic=TOPIC, ids="string")
    assert (x["id"], y["id"]) == (str(numbers[0]), texts[0])
    assert await topics.good("POST", "/ack", [named(x), named(y)], ids="string") == [
        {"id": id, "success": True, "error": None} for id in (x["id"], y["id"])
    ]


async def test_the_short_paths_are_those_of_mqueue(api: Api) -> None:
    base: dict[str, Any] = {"namespace": "payments", "topic": "refunds"}
    answer = await api.call("POST", "/enqueue", [base | {"payload": b64(b"1")}, base | {"payload": b64(b"2")}])
    assert answer.status == 200 and len(answer.body) == 2
    answer = await api.call("GET", "/topics", namespace="payments")
    assert answer.body == ["refunds"]
    one, two = (await api.call("GET", "/dequeue", **base)).body
    assert (one["payload"], two["payload"]) == (b64(b"1"), b64(b"2"))
    assert await _text(api, "/ack", base | {"id": one["id"]}) == (200, "OK")
    assert (await api.call("POST", "/api/v1/topics/configure", base | {"options": {"max_retries": 0}})).status == 200
    assert await _text(api, "/nack", base | {"id": two["id"], "error": "no"}) == (200, "OK")
    (dead,) = (await api.call("GET", "/dlq", **base)).body
    assert dead["original_id"] == two["id"] and dead["last_error"] == "no"
    assert (await api.call("GET", "/topics", namespace="payments")).body == []
    assert await _text(api, "/dlq/retry", base | {"id": dead["id"]}) == (200, "OK")
    (again,) = (await api.call("GET", "/dequeue", **base)).body
    await _text(api, "/nack", base | {"id": again["id"]})
    assert await _text(api, "/dlq/delete", base | {"id": dead["id"]}) == (200, "OK")
    assert (await api.call("GET", "/dlq", **base)).body == []
    assert (await api.call("GET", "/dequeue", namespace="payments")).status == 400


async def _text(api: Api, path: str, body: Any) -> tuple[int, str]:
    answer = await api.call("POST", path, body)
    return answer.status, answer.body


async def test_peeking_shows_what_is_leased_and_by_whom_until_it_is_released(topics: TopicApi) -> None:
    await topics.enqueue(item("a"), item("b"))
    (taken,) = await topics.dequeue(limit=1)
    (leased,) = await topics.good("GET", "/peek", namespace=NAMESPACE, topic=TOPIC, leased=True)
    assert (leased["data"], leased["status"], leased["lease_owner"]) == ("a", "leased", taken["lease_owner"])
    await topics.good("POST", "/release", [named(leased)])
    assert await topics.good("GET", "/peek", namespace=NAMESPACE, topic=TOPIC, leased=True) == []


async def test_peeking_changes_nothing_and_follows_the_order(topics: TopicApi) -> None:
    await topics.enqueue(item("later", delay=100), item("b", priority=1), item("a"))
    for _ in range(2):
        peeked = await topics.good("GET", "/peek", namespace=NAMESPACE, topic=TOPIC)
        assert values(peeked) == ["a", "b"]
        assert {one["status"] for one in peeked} == {"ready"}
    both = await topics.good("GET", "/peek", namespace=NAMESPACE, topic=TOPIC, delayed=True)
    assert values(both) == ["a", "later", "b"]


async def test_peeking_passes_over_as_many_items_as_it_is_asked_to(topics: TopicApi) -> None:
    await topics.enqueue(item("c", priority=1), *(item(number) for number in range(4)))
    which: dict[str, Any] = {"namespace": NAMESPACE, "topic": TOPIC, "limit": 2}
    for offset, expected in ((0, [0, 1]), (3, [3, "c"]), (4, ["c"]), (5, []), (1 << 60, [])):
        assert values(await topics.good("GET", "/peek", **which, offset=offset)) == expected
    await topics.dequeue(limit=3)
    assert values(await topics.good("GET", "/peek", **which, leased=True, offset=2)) == [2]


async def test_a_purged_topic_is_empty_and_its_keys_are_free(topics: TopicApi) -> None:
    ids = await topics.enqueue(item("x", idempotency_key="k"), item("y"), item("z", delay=100))
    (got,) = await topics.dequeue(1)
    assert await topics.good("POST", "/purge", {"namespace": NAMESPACE, "topic": TOPIC}) == {
        "namespace": NAMESPACE,
        "topic": TOPIC,
        "removed": 3,
    }
    assert await topics.ack(got) == [False]
    (new,) = await topics.enqueue(item("x", idempotency_key="k"))
    assert new not in ids
    assert values(await topics.dequeue()) == ["x"]


async def test_a_deleted_topic_is_gone_and_may_come_back(topics: TopicApi, connection: Connection) -> None:
    await topics.configure(max_retries=9)
    await topics.enqueue(item("x"), item("y"))
    await topics.dequeue(1)
    assert (await topics.good("DELETE", "", namespace=NAMESPACE, topic=TOPIC))["deleted"] is True
    assert (await topics.good("DELETE", "", namespace=NAMESPACE, topic=TOPIC))["deleted"] is False
    for table in ("topics", "topic_items", "topic_heads"):
        assert await connection.fetchval(f"SELECT count(*) FROM queen.{table}") == 0
    await topics.enqueue(item("z"))
    assert values(await topics.dequeue()) == ["z"]
    (found,) = await topics.good("GET", "/counts", namespace=NAMESPACE)
    assert found["options"]["max_retries"] == 3


async def test_enqueues_beside_deletes_are_stored_or_deleted_and_never_fail(
    topics: TopicApi, connection: Connection
) -> None:
    async def enqueue(n: int) -> None:
        for m in range(20):
            await topics.enqueue(item([n, m]))

    async def delete() -> None:
        for _ in range(10):
            await topics.call("DELETE", "", namespace=NAMESPACE, topic=TOPIC)

    await asyncio.gather(*(enqueue(n) for n in range(5)), delete())
    await topics.enqueue(item("last"))
    left = await topics.dequeue(1000)
    assert left[-1]["data"] == "last"
    assert topics.api.worker is not None
    await topics.api.worker.broker.jobs.run_once()
    strays = "SELECT count(*) FROM queen.topic_items WHERE topic_id NOT IN (SELECT id FROM queen.topics)"
    assert await connection.fetchval(strays) == 0


async def test_options_that_are_not_sent_stay_and_null_means_the_default(topics: TopicApi) -> None:
    configured = await topics.configure(max_retries=7, lease_seconds=2)
    assert configured == {
        "namespace": NAMESPACE,
        "topic": TOPIC,
        "options": {
            "max_retries": 7,
            "backoff_base_ms": 1000,
            "backoff_cap_ms": 300_000,
            "lease_seconds": 2,
            "at_most_once": False,
            "ttl_seconds": None,
        },
    }
    assert (await topics.configure(max_retries=None, ttl_seconds=5))["options"] == configured["options"] | {
        "max_retries": 3,
        "ttl_seconds": 5,
    }


async def test_what_a_client_that_went_away_would_have_got_is_given_to_the_next(topics: TopicApi) -> None:
    waiting = [asyncio.create_task(topics.dequeue(wait=True, timeout=60_000)) for _ in range(20)]
    await asyncio.sleep(0.2)
    sent = asyncio.create_task(topics.enqueue(item("x"), item("y")))
    for task in waiting:
        task.cancel()
    await sent
    served: list[Any] = []
    async with asyncio.timeout(100):
        while len(served) < 2:
            served += await topics.dequeue(wait=True, timeout=1000)
    assert values(served) == ["x", "y"]
    assert {one["retries"] for one in served} == {0}


async def test_an_item_below_the_head_is_served_first(topics: TopicApi) -> None:
    """Heads were moved past its time: a lapsed lease, a time of the past, a dead letter that comes back."""
    assert topics.api.worker is not None
    broker = topics.api.worker.broker
    await topics.enqueue(*(item(n) for n in range(6)))
    lapsing = await topics.dequeue(1, lease=2)
    acked = await topics.dequeue(3)
    await topics.ack(*acked)
    (topic,) = (await broker.topics.catalog.find([(NAMESPACE, TOPIC)])).values()
    await broker.topics.heads.advance(topic.id)
    await topics.enqueue(item("past", deliver_after="2001-01-01T00:00:00Z"))
    assert values(await topics.dequeue(1)) == ["past"]
    await broker.topics.heads.advance(topic.id)
    await topics.until_ready(3)
    assert values(await topics.dequeue()) == [lapsing[0]["data"], 4, 5]
    await broker.topics.heads.advance(topic.id)
    await topics.enqueue(item("new"), item("other priority", priority=9))
    assert values(await topics.dequeue()) == ["new", "other priority"]


@pytest.mark.parametrize("kept", ["in memory", "in Redis"])
async def test_a_repeated_key_is_found_whatever_is_remembered_of_it(
    start_server: StartServer, tmp_path: Path, kept: str
) -> None:
    redis = RedisServer(tmp_path / "redis")
    settings: dict[str, object] = {}
    if kept == "in Redis":
        await redis.start()
        settings = {"redis_addrs": redis.address, "redis_timeout_ms": 5000}
    try:
        topics = TopicApi(await start_server(**settings))
        assert topics.api.worker is not None
        keys = topics.api.worker.broker.topics._keys
        first = await topics.enqueue(item(1, idempotency_key="a"), item(2, topic="other", idempotency_key="b"))
        await keys.stop()
        assert await topics.enqueue(item(3, idempotency_key="a"), item(4, idempotency_key="b")) == first
        # Remembered, but PostgreSQL knows nothing of it: the item must not be taken for a duplicate.
        await keys._keys.learn(NAMESPACE, ["never stored"], 600)
        (new,) = await topics.enqueue(item(5, idempotency_key="never stored"))
        assert new not in first
        if kept == "in Redis":
            await redis.call("FLUSHALL")
            assert await topics.enqueue(item(6, idempotency_key="a")) == first[:1]
            await redis.kill()
            assert await topics.enqueue(item(7, idempotency_key="b")) == first[1:]
        assert (await topics.counts())["ready"] == 2
    finally:
        await redis.kill()


async def test_a_wrong_owner_does_not_mask_the_holder_in_the_same_batch(topics: TopicApi) -> None:
    """Requests that arrive together share a statement, and each is decided by id, owner and topic."""
    await topics.enqueue(item("other topic", topic="u"))
    for operation in ("ack", "nack", "extend", "release"):
        await topics.enqueue(item(operation))
        (leased,) = await topics.dequeue(lease=60)
        refs = [
            named(leased, lease_owner="an impostor"),
            named(leased, topic="u"),
            named(leased, lease_owner=leased["lease_owner"]),
            named(leased, lease_owner="another"),
        ]
        answers = await topics.good("POST", f"/{operation}", refs)
        assert [answer["success"] for answer in answers] == [False, False, True, False], operation
        await topics.good("POST", "/purge", {"namespace": NAMESPACE, "topic": TOPIC})


async def test_acks_of_the_holder_succeed_beside_a_flood_of_wrong_ones(topics: TopicApi) -> None:
    await topics.enqueue(*(item(number) for number in range(100)))
    leased = await topics.dequeue(limit=100)
    calls = []
    for one in leased:
        calls.append(topics.call("POST", "/ack", [named(one, lease_owner="an impostor")]))
        calls.append(topics.call("POST", "/ack", [named(one, lease_owner=one["lease_owner"])]))
    answers = [answer.body[0]["success"] for answer in await asyncio.gather(*calls)]
    assert answers == [False, True] * 100


async def test_an_extension_counts_for_every_reference_to_the_lease(topics: TopicApi) -> None:
    await topics.enqueue(item("x"))
    (leased,) = await topics.dequeue()
    refs = [named(leased), named(leased, lease_owner=leased["lease_owner"]), named(leased, lease_owner="no")]
    answers = await topics.good("POST", "/extend", refs)
    assert [answer["success"] for answer in answers] == [True, True, False]


@pytest.mark.parametrize("operation", ["ack", "nack", "extend", "release"])
async def test_a_nul_in_a_lease_owner_is_a_bad_request(topics: TopicApi, operation: str) -> None:
    ref = {"id": 1, "namespace": NAMESPACE, "topic": TOPIC, "lease_owner": "a\0b"}
    answer = await topics.call("POST", f"/{operation}", [ref])
    assert answer.status == 400 and "[0].lease_owner" in answer.body["error"]
    operations = [{"type": "ackItem"} | ref]
    assert (await topics.api.call("POST", "/api/v1/transaction", {"operations": operations})).status == 400
