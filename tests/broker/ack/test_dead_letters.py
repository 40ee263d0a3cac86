"""The dead letter queue: looking at it, redriving messages, throwing them away."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from tests.conftest import StartServer
from tests.support.api import Api

KEY = "00" * 32


async def bury(api: Api, queue: str, *payloads: Any, group: str | None = None, partition: str = "Default") -> list[Any]:
    """Push payloads (their transaction id is their text) and have them fail for good."""
    await api.push(queue, *payloads, partition=partition, ids=[str(payload) for payload in payloads])
    return await fail(api, queue, group, partition, len(payloads))


async def fail(api: Api, queue: str, group: str | None, partition: str, batch: int) -> list[Any]:
    query = {"consumerGroup": group} if group else {}
    messages = await api.pop(queue, partition, batch=batch, **query)
    await api.ack(messages, "dlq", group=group, error=f"{group or 'nobody'} could not")
    return messages


async def letters(api: Api, **query: Any) -> list[Any]:
    answer = await api.call("GET", "/api/v1/dlq", **query)
    assert answer.status == 200, answer
    messages: list[Any] = answer.body["messages"]
    return messages


async def test_a_dead_letter_holds_what_was_sent_and_why_it_failed(api: Api) -> None:
    (message,) = await bury(api, "orders", "a")
    answer = await api.call("GET", "/api/v1/dlq", queue="orders")
    (letter,) = answer.body["messages"]
    created_at, failed_at = letter.pop("createdAt"), letter.pop("failedAt")
    assert created_at <= failed_at and len(created_at) == len(failed_at) == 24
    assert letter == {
        "id": message["id"],
        "transactionId": "a",
        "partitionId": message["partitionId"],
        "queue": "orders",
        "partition": "Default",
        "consumerGroup": "__QUEUE_MODE__",
        "errorMessage": "nobody could not",
        "retryCount": 0,
        "data": "a",
        "traceId": None,
        "producerSub": None,
    }
    assert answer.body["total"] == 1
    assert answer.body["pagination"] == {"limit": 100, "offset": 0, "total": 1}


async def test_dead_letters_are_filtered_and_shown_newest_failure_first(api: Api) -> None:
    await bury(api, "q1", "a", "b")
    await bury(api, "q1", "c", group="g1", partition="x")
    await bury(api, "q2", "d", group="g1")

    async def ids(**query: Any) -> list[str]:
        return [letter["transactionId"] for letter in await letters(api, **query)]

    assert await ids() == ["d", "c", "b", "a"]
    assert await ids(queue="q1") == ["c", "b", "a"]
    assert await ids(consumerGroup="g1") == ["d", "c"]
    assert await ids(queue="q1", consumerGroup="g1") == ["c"]
    assert await ids(partition="Default") == ["d", "b", "a"]
    assert await ids(queue="q1", partition="x") == ["c"]
    for nothing in ({"queue": "q3"}, {"consumerGroup": "g9"}, {"partition": "y"}, {"queue": "a\x00"}):
        assert await ids(**nothing) == []
    failed_at = [letter["failedAt"] for letter in await letters(api)]
    assert await ids(to="2020-01-01") == []
    assert await ids(**{"from": failed_at[0]}) == ["d"]
    assert set(await ids(**{"from": failed_at[3]})) == {"a", "b", "c", "d"}
    assert await ids(**{"from": "2020-01-01T00:00:00+02:00", "to": failed_at[0]}) == ["c", "b", "a"]


async def test_dead_letters_are_paged_without_gaps_or_repeats(api: Api) -> None:
    await bury(api, "orders", *range(25))
    seen: list[int] = []
    for offset in range(0, 30, 6):
        answer = await api.call("GET", "/api/v1/dlq", queue="orders", limit=6, offset=offset)
        assert answer.body["total"] == 25
        seen += [letter["data"] for letter in answer.body["messages"]]
    assert seen == list(range(24, -1, -1))
    assert len(await letters(api, limit=-3)) == len(await letters(api, limit=1, offset=-7)) == 1
    assert len(await letters(api, limit=10**9)) == len(await letters(api, limit="x", offset="y")) == 25
    assert await letters(api, offset=2**63) == await letters(api, offset=25) == []


@pytest.mark.parametrize("name", ["from", "to"])
async def test_a_bad_time_is_refused_by_name_and_value(api: Api, name: str) -> None:
    query: dict[str, Any] = {name: "noon"}
    for method, path in (("GET", "/api/v1/dlq"), ("DELETE", "/api/v1/dlq")):
        answer = await api.call(method, path, **query, queue="orders")
        assert answer.status == 400 and name in answer.body["error"] and "noon" in answer.body["error"]


async def test_retrying_sends_the_messages_round_in_their_order(api: Api) -> None:
    await bury(api, "orders", *range(250))
    await bury(api, "orders", "y1", "y2", partition="y")
    answer = await api.call("POST", "/api/v1/dlq/retry", {"queue": "orders"})
    assert answer.status == 200
    assert answer.body == {
        "success": True,
        "queue": "orders",
        "retried": 252,
        "deadLettersRemoved": 252,
        "remaining": 0,
    }
    assert await letters(api) == []
    messages = await api.pop("orders", "Default", batch=1000)
    assert [message["data"] for message in messages] == list(range(250))
    assert messages[7]["transactionId"] == "7:retry-1"
    assert [message["data"] for message in await api.pop("orders", "y", batch=10)] == ["y1", "y2"]


async def test_retrying_is_limited_to_what_the_filter_names(api: Api) -> None:
    await bury(api, "orders", *range(5))
    await bury(api, "orders", "x", partition="x")
    await fail(api, "orders", "g1", "Default", 2)

    async def retry(**body: Any) -> tuple[int, int]:
        answer = await api.call("POST", "/api/v1/dlq/retry", {"queue": "orders", **body})
        assert answer.status == 200, answer
        return answer.body["retried"], answer.body["remaining"]

    assert await retry(transactionIds=[]) == await retry(transactionIds=["no", "n\x00"]) == (0, 0)
    assert await retry(consumerGroup="g9") == await retry(partition="y") == (0, 0)
    assert await retry(transactionIds=["3"]) == (1, 0)
    assert await retry(partition="x") == (1, 0)
    assert await retry(consumerGroup="g1", limit=1) == (1, 1)
    assert await retry(to="2020-01-01T00:00:00Z") == (0, 0)
    # Message 0 is still a dead letter of queue mode, message 1 of both: each is sent round once.
    assert await retry() == (4, 0)
    assert await letters(api) == []


async def test_a_message_that_several_groups_gave_up_on_is_sent_round_once(api: Api) -> None:
    await bury(api, "orders", "a")
    for group in ("g1", "g2"):
        await fail(api, "orders", group, "Default", 1)
    answer = await api.call("POST", "/api/v1/dlq/retry", {"queue": "orders"})
    assert (answer.body["retried"], answer.body["deadLettersRemoved"]) == (1, 3)
    for group in ("g1", "g2"):
        (message,) = await api.pop("orders", consumerGroup=group, batch=10)
        assert message["transactionId"] == "a:retry-1"


async def test_retrying_from_several_places_at_once_sends_each_message_round_once(start_server: StartServer) -> None:
    workers = [await start_server(worker_id, num_workers=2) for worker_id in (0, 1)]
    for partition in ("x", "y", "z"):
        await bury(workers[0], "orders", *[f"{partition}{n}" for n in range(150)], partition=partition)
    calls = [
        worker.call("POST", "/api/v1/dlq/retry", body)
        for worker in workers
        for body in ({"queue": "orders"}, {"queue": "orders", "partition": "y"}, {"queue": "orders", "limit": 100})
    ]
    answers = await asyncio.gather(*calls)
    assert {answer.status for answer in answers} == {200}
    assert sum(answer.body["retried"] for answer in answers) == 450
    for partition in ("x", "y", "z"):
        data = [message["data"] for message in await workers[1].pop("orders", partition, batch=1000)]
        assert sorted(data) == sorted(f"{partition}{n}" for n in range(150))
    assert await letters(workers[0]) == []


async def test_a_retry_that_is_killed_in_between_leaves_every_message_dead_or_pending_never_both(
    api: Api, connection: asyncpg.Connection[asyncpg.Record]
) -> None:
    await bury(api, "orders", *range(300))
    retrying = asyncio.ensure_future(api.call("POST", "/api/v1/dlq/retry", {"queue": "orders"}))
    while not retrying.done():
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            " AND datname = current_database() AND query LIKE '%queen.dead_letters%'"
        )
    dead = {letter["data"] for letter in await letters(api, limit=1000)}
    answer = await api.call("POST", "/api/v1/dlq/retry", {"queue": "orders"})
    assert answer.status == 200 and answer.body["retried"] == len(dead)
    assert sorted(message["data"] for message in await api.pop("orders", batch=1000)) == list(range(300))


async def test_what_fails_again_keeps_counting_its_retries(api: Api) -> None:
    await bury(api, "orders", "a")
    for name in ("a:retry-1", "a:retry-2", "a:retry-3"):
        assert (await api.call("POST", "/api/v1/dlq/retry", {"queue": "orders"})).body["retried"] == 1
        (message,) = await fail(api, "orders", None, "Default", 10)
        assert message["transactionId"] == name


async def test_a_retried_message_keeps_trace_id_and_producer(
    api: Api, connection: asyncpg.Connection[asyncpg.Record]
) -> None:
    trace_id = "0190b8a0-0000-7000-8000-000000000000"
    item = {"queue": "orders", "payload": 1, "transactionId": "a", "traceId": trace_id}
    await api.call("POST", "/api/v1/push", {"items": [item]})
    await fail(api, "orders", None, "Default", 1)
    await bury(api, "orders", "b", "c")
    await connection.execute("UPDATE queen.dead_letters SET producer_sub = 'alice' WHERE transaction_id <> 'b'")
    await api.call("POST", "/api/v1/dlq/retry", {"queue": "orders"})
    messages = await api.pop("orders", batch=10)
    assert [message["traceId"] for message in messages] == [trace_id, None, None]
    assert [message["producerSub"] for message in messages] == ["alice", None, "alice"]


async def test_a_full_queue_says_how_far_the_retry_came(api: Api) -> None:
    await bury(api, "orders", *range(150))
    await api.configure("orders", maxSize=120)
    answer = await api.call("POST", "/api/v1/dlq/retry", {"queue": "orders"})
    assert answer.status == 409
    assert "max capacity" in answer.body["error"] and "100 messages" in answer.body["error"]
    assert (await api.call("GET", "/api/v1/dlq")).body["total"] == 50


async def test_purging_throws_away_what_the_filter_names(api: Api) -> None:
    await bury(api, "orders", *range(10))
    await bury(api, "orders", "x", partition="x")
    await bury(api, "other", "o")

    async def purge(json: Any = None, **query: Any) -> int:
        answer = await api.call("DELETE", "/api/v1/dlq", json, **query)
        assert answer.status == 200 and answer.body["success"] is True
        deleted: int = answer.body["deleted"]
        return deleted

    assert await purge({"queue": "orders", "transactionIds": ["1", "2"]}) == 2
    assert await purge(queue="orders", transactionIds="3") == 1
    assert await purge(queue="orders", partition="x") == 1
    assert await purge(queue="orders", consumerGroup="g1") == 0
    assert await purge(queue="orders") == 7
    assert [letter["queue"] for letter in await letters(api)] == ["other"]


async def test_bad_requests_change_nothing(api: Api) -> None:
    await bury(api, "orders", "a")
    bad: list[Any] = [
        {},
        {"queue": ""},
        {"queue": None},
        {"queue": 7},
        {"queue": "orders", "partition": 1},
        {"queue": "orders", "consumerGroup": []},
        {"queue": "orders", "transactionIds": [1]},
        {"queue": "orders", "transactionIds": {"a": 1}},
        {"queue": "orders", "from": "noon"},
        [],
        "orders",
    ]
    for body in bad:
        for method, path in (("POST", "/api/v1/dlq/retry"), ("DELETE", "/api/v1/dlq")):
            answer = await api.call(method, path, body)
            assert answer.status == 400 and answer.body["error"], (method, body, answer)
    for limit in ("10", True, 1.5):
        answer = await api.call("POST", "/api/v1/dlq/retry", {"queue": "orders", "limit": limit})
        assert answer.status == 400 and "limit" in answer.body["error"]
    for data in (b"", b"{"):
        assert (await api.call("POST", "/api/v1/dlq/retry", data=data)).status == 400
    assert (await api.call("DELETE", "/api/v1/dlq")).status == 400
    for queue in ("unknown", "a\x00b"):
        assert (await api.call("POST", "/api/v1/dlq/retry", {"queue": queue})).status == 404
        assert (await api.call("DELETE", "/api/v1/dlq", queue=queue)).status == 404
    assert len(await letters(api)) == 1


async def test_dead_letters_of_an_encrypted_queue_are_sealed_and_shown_in_clear(
    start_server: StartServer, connection: asyncpg.Connection[asyncpg.Record]
) -> None:
    api = await start_server(queen_encryption_key=(KEY,))
    await api.configure("secrets", encryptionEnabled=True)
    await bury(api, "secrets", "pin-1234")
    assert [letter["data"] for letter in await letters(api)] == ["pin-1234"]
    assert b"pin-1234" not in await connection.fetchval("SELECT body FROM queen.dead_letters")
    unable = await start_server()
    (letter,) = await letters(unable)
    assert letter["data"] is None and "QUEEN_ENCRYPTION_KEY" in letter["unreadable"]
    refused = await unable.call("POST", "/api/v1/dlq/retry", {"queue": "secrets"})
    assert refused.status == 409 and len(await letters(api)) == 1
    assert (await api.call("POST", "/api/v1/dlq/retry", {"queue": "secrets"})).body["retried"] == 1
    assert [message["data"] for message in await api.pop("secrets", batch=10)] == ["pin-1234"]
    for row in await connection.fetch("SELECT body FROM queen.segments"):
        assert b"pin-1234" not in row["body"]


async def test_a_report_says_what_dead_letters_died_of(api: Api) -> None:
    for queue, errors in (
        ("orders", ["order 17 of 'ann' is unknown", "order 4 of 'bob' is unknown", "disk full\nat line 7"]),
        ("bills", ["timeout after 1.5 s"]),
    ):
        await api.configure(queue, retryLimit=0)
        await api.push(queue, *range(len(errors)))
        for error in errors:
            await api.ack(await api.pop(queue, consumerGroup="g"), "failed", group="g", error=error)
    report = (await api.call("GET", "/api/v1/dlq/report")).body
    assert report["total"] == 4
    assert [(one["queue"], one["consumerGroup"], one["error"], one["count"]) for one in report["reasons"][:1]] == [
        ("orders", "g", "order <n> of <text> is unknown", 2)
    ]
    assert {one["error"]: one["count"] for one in report["reasons"][1:]} == {"disk full": 1, "timeout after <n> s": 1}
    (newest,) = (await api.call("GET", "/api/v1/dlq/report", queue="orders", limit=1)).body["reasons"]
    message = await api.call("GET", f"/api/v1/messages/{newest['partitionId']}/{newest['transactionId']}")
    assert message.body["errorMessage"] == "order 4 of 'bob' is unknown"
    assert (await api.call("GET", "/api/v1/dlq/report", queue="nobody")).body == {"total": 0, "reasons": []}
