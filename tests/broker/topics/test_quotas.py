"""Quotas: so many items a minute for a namespace, over all workers, in any minute."""

from __future__ import annotations

import asyncio

from tests.conftest import StartServer
from tests.support.database import Connection
from tests.support.topic_api import TopicApi, item


async def test_a_namespace_over_its_quota_gets_a_retry_after(start_server: StartServer) -> None:
    topics = TopicApi(await start_server(namespace_quotas=(("ns", 10),)))
    await topics.enqueue(*(item(n) for n in range(8)))
    refused = await topics.call("POST", "/enqueue", [item(n) for n in range(3)])
    assert refused.status == 429
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert "ns" in refused.body["error"] and "10 items" in refused.body["error"]
    assert (await topics.counts())["ready"] == 8, "nothing of it was stored"
    await topics.enqueue(item("fits"), item("too"))
    assert (await topics.call("POST", "/enqueue", item("over"))).status == 429
    await topics.enqueue(*(item(n, namespace="other") for n in range(100)))


async def test_a_request_that_never_fits_is_a_bad_one_and_a_quota_of_nothing_admits_nothing(
    start_server: StartServer,
) -> None:
    topics = TopicApi(await start_server(namespace_quotas=(("ns", 2), ("none", 0))))
    answer = await topics.call("POST", "/enqueue", [item(n) for n in range(3)])
    assert answer.status == 400 and "split" in answer.body["error"]
    assert (await topics.call("POST", "/enqueue", item("x", namespace="none"))).status == 429


async def test_a_refused_namespace_does_not_cost_the_others_of_the_request(start_server: StartServer) -> None:
    topics = TopicApi(await start_server(namespace_quotas=(("a", 2), ("b", 1))))
    await topics.enqueue(item("x", namespace="b"))
    both = [item("x", namespace="a"), item("y", namespace="b")]
    for _ in range(5):
        assert (await topics.call("POST", "/enqueue", both)).status == 429
    await topics.enqueue(item(1, namespace="a"), item(2, namespace="a"))


async def test_the_window_slides(start_server: StartServer, connection: Connection) -> None:
    topics = TopicApi(await start_server(namespace_quotas=(("ns", 4),)))
    await topics.enqueue(item(1), item(2))
    await connection.execute("UPDATE queen.topic_usage SET second = second - 30")
    await topics.enqueue(item(3), item(4))
    refused = await topics.call("POST", "/enqueue", item(5))
    assert refused.status == 429 and int(refused.headers["Retry-After"]) <= 31
    await connection.execute("UPDATE queen.topic_usage SET second = second - 31")
    await topics.enqueue(item(5), item(6))
    assert (await topics.call("POST", "/enqueue", item(7))).status == 429


async def test_workers_together_admit_no_more_than_the_quota(start_server: StartServer, connection: Connection) -> None:
    quota = 2000
    pair = [
        TopicApi(await start_server(worker_id=id, num_workers=2, namespace_quotas=(("ns", quota),))) for id in range(2)
    ]
    answers = await asyncio.gather(
        *(pair[n % 2].call("POST", "/enqueue", [item(m) for m in range(10)]) for n in range(300))
    )
    admitted = 10 * sum(answer.status == 200 for answer in answers)
    assert {answer.status for answer in answers} == {200, 429}
    assert admitted <= quota
    assert admitted >= quota - 2 * quota // 200, "at most what each worker holds in reserve is not used"
    assert await connection.fetchval("SELECT count(*) FROM queen.topic_items") == admitted


async def test_a_quota_that_is_set_wins_and_null_lets_the_setting_decide(start_server: StartServer) -> None:
    topics = TopicApi(await start_server(namespace_quotas=(("ns", 1),)))
    await topics.good("PUT", "/quotas", {"namespace": "ns", "per_minute": 5})
    assert await topics.good("GET", "/quotas") == {"ns": 5}
    await topics.enqueue(*(item(n) for n in range(5)))
    assert await topics.good("PUT", "/quotas", {"namespace": "ns", "per_minute": None}) == {
        "namespace": "ns",
        "per_minute": 1,
    }
    assert (await topics.call("POST", "/enqueue", item("x"))).status == 429


async def test_the_default_quota_is_that_of_every_namespace_without_one_of_its_own(start_server: StartServer) -> None:
    topics = TopicApi(await start_server(namespace_quotas=(("default", 2), ("own", 4))))
    for namespace, quota in (("default", 2), ("one", 2), ("two", 2), ("own", 4)):
        for number in range(quota):
            await topics.enqueue(item(number, namespace=namespace))
        assert (await topics.call("POST", "/enqueue", item("x", namespace=namespace))).status == 429, namespace
    await topics.good("PUT", "/quotas", {"namespace": "one", "per_minute": 3})
    await topics.enqueue(item(2, namespace="one"))
    # Also one that is set at run time.
    await topics.good("PUT", "/quotas", {"namespace": "default", "per_minute": 5})
    await topics.enqueue(*(item(number, namespace="three") for number in range(5)))
    assert (await topics.call("POST", "/enqueue", item("x", namespace="three"))).status == 429
    assert await topics.good("GET", "/quotas") == {"default": 5, "one": 3, "own": 4}
