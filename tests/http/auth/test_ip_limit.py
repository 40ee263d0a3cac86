"""Requests per minute and client address."""

from __future__ import annotations

from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, issue
from tests.redis.redis_server import RedisServer
from tests.support.topic_api import TopicApi, item


async def test_without_a_limit_nothing_is_counted(start_server: StartServer) -> None:
    answer = await (await start_server()).call("GET", "/api/v1/resources/overview")
    assert answer.status == 200 and "X-RateLimit-Limit" not in answer.headers


async def test_an_address_is_refused_once_it_has_used_up_its_minute(start_server: StartServer) -> None:
    api = await start_server(ip_limit_per_minute=3)
    left = []
    for _ in range(3):
        answer = await api.call("GET", "/topics", namespace="ns")
        assert (answer.status, answer.headers["X-RateLimit-Limit"]) == (200, "3")
        left.append(answer.headers["X-RateLimit-Remaining"])
    assert left == ["2", "1", "0"]
    refused = await api.call("GET", "/topics", namespace="ns")
    assert (refused.status, refused.headers["X-RateLimit-Remaining"]) == (429, "0")
    assert "3 requests a minute" in refused.body["error"]
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    # Whoever looks whether the server lives is not counted.
    assert (await api.call("GET", "/health")).status == 200


async def test_what_is_refused_for_its_token_counts_too(start_server: StartServer) -> None:
    api = await start_server(ip_limit_per_minute=6, jwt_enabled=True, jwt_secret=SECRET)
    guessing, limited = api.bearing("a.b.c"), api.bearing(issue("read-write", queues=["mine"]))
    for caller, path, status in (
        (guessing, "/api/v1/status", 401),
        (limited, "/api/v1/status", 403),
        (limited, "/api/v1/pop/queue/theirs", 403),
        (limited, "/api/v1/pop/queue/mine", 204),
    ):
        assert (await caller.call("GET", path)).status == status
    statuses = [(await guessing.call("GET", "/api/v1/status")).status for _ in range(4)]
    assert statuses == [401, 401, 429, 429]
    assert (await limited.call("GET", "/api/v1/pop/queue/mine")).status == 429
    for caller in (guessing, limited):
        await caller.close()


async def test_servers_with_redis_count_together_and_fail_open(start_server: StartServer, redis: RedisServer) -> None:
    first, second = [
        await start_server(ip_limit_per_minute=2, redis_addrs=redis.address, redis_timeout_ms=5000) for _ in range(2)
    ]
    for api in (first, second):
        assert (await api.call("GET", "/topics", namespace="ns")).status == 200
    assert (await first.call("GET", "/topics", namespace="ns")).status == 429
    await redis.kill()
    answer = await first.call("GET", "/topics", namespace="ns")
    assert answer.status == 200 and "X-RateLimit-Limit" not in answer.headers


async def test_quotas_are_counted_in_redis_and_without_it_in_postgresql(
    start_server: StartServer, redis: RedisServer
) -> None:
    settings = {"namespace_quotas": "ns:10", "redis_addrs": redis.address, "redis_timeout_ms": 5000}
    first, second = [TopicApi(await start_server(**settings)) for _ in range(2)]
    await first.enqueue(*(item(n) for n in range(6)))
    answer = await second.call("POST", "/enqueue", [item(n) for n in range(6)])
    assert answer.status == 429 and 1 <= int(answer.headers["Retry-After"]) <= 60
    await second.enqueue(*(item(n) for n in range(4)))
    await redis.kill()
    # PostgreSQL begins to count where Redis ends.
    await second.enqueue(*(item(n) for n in range(10)))
    assert (await first.call("POST", "/enqueue", [item(0)])).status == 429
