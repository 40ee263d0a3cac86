"""Keys and values: what each operation does, alone, in a batch, and as part of a transaction."""

from __future__ import annotations

import asyncio
from typing import Any

from queen.broker.maintenance.jobs import JobRunner
from tests.support.api import Answer, Api
from tests.support.database import Connection

NS = "orders"


async def kv(api: Api, *operations: dict[str, Any]) -> Any:
    answer = await api.call("POST", "/api/v1/kv", {"operations": [{"ns": NS} | one for one in operations]})
    assert answer.status == 200, answer
    return answer.body


async def one(api: Api, op: str, key: str, **fields: Any) -> dict[str, Any]:
    (result,) = (await kv(api, {"op": op, "key": key} | fields))["results"]
    found: dict[str, Any] = result
    return found


async def put(api: Api, key: str, value: Any, ttl: int = 60, **fields: Any) -> dict[str, Any]:
    return await one(api, "put", key, value=value, ttlSeconds=ttl, **fields)


async def commit(api: Api, operations: list[dict[str, Any]], *riders: dict[str, Any]) -> Answer:
    return await api.call(
        "POST", "/api/v1/transaction", {"operations": operations, "kv": [{"ns": NS} | one for one in riders]}
    )


def push(queue: str, payload: Any) -> dict[str, Any]:
    return {"type": "push", "items": [{"queue": queue, "payload": payload}]}


async def expire(connection: Connection) -> None:
    """As if the time of every key that has one were up."""
    await connection.execute("UPDATE queen.kv SET expires_at = clock_timestamp() WHERE expires_at IS NOT NULL")


async def test_namespaces_and_their_keys_are_listed_by_name(api: Api, connection: Connection) -> None:
    for number in range(12):
        await put(api, f"order-{number:02}", {"n": number})
    large = "x" * 2000
    await put(api, "large/key", large)
    await put(api, "gone", 1)
    await connection.execute("UPDATE queen.kv SET expires_at = clock_timestamp() WHERE key = 'gone'")
    for ns in ("stock", "queen-locks", "Orders-old"):
        await kv(api, {"op": "put", "ns": ns, "key": "k", "value": 1, "forever": True})
    listed = (await api.call("GET", "/api/v1/kv")).body
    assert [(one["namespace"], one["keys"]) for one in listed["namespaces"]] == [
        ("Orders-old", 1),
        (NS, 13),
        ("stock", 1),
    ]
    page = (await api.call("GET", "/api/v1/kv", search="ORDER", limit=1, offset=1)).body
    assert [one["namespace"] for one in page["namespaces"]] == [NS] and page["total"] == 2
    assert (await api.call("GET", "/api/v1/kv", offset=10)).body["total"] == 3
    keys = (await api.call("GET", f"/api/v1/kv/{NS}", prefix="order-", limit=2, offset=10)).body
    assert [(one["key"], one["value"], one["bytes"]) for one in keys["keys"]] == [
        ("order-10", {"n": 10}, 9),
        ("order-11", {"n": 11}, 9),
    ]
    assert (keys["total"], keys["exact"]) == (12, True)
    (first, *_) = (await api.call("GET", f"/api/v1/kv/{NS}")).body["keys"]
    assert (first["key"], first["bytes"], "value" in first) == ("large/key", 2002, False)
    entry = await api.call("GET", f"/api/v1/kv/{NS}/large%2Fkey")
    assert (entry.body["value"], entry.body["version"]) == (large, first["version"])
    assert (await api.call("GET", f"/api/v1/kv/{NS}/gone")).status == 404
    assert (await api.call("GET", "/api/v1/kv/nowhere")).body["keys"] == []


async def test_what_is_put_is_read_until_it_is_deleted(api: Api) -> None:
    value = {"state": "held", "n": 12345678901234567890, "text": "é\x00"}
    written = await put(api, "a", value)
    assert written["applied"] and written["version"] > 0 and written["value"] == value
    read = await one(api, "get", "a")
    assert (read["found"], read["value"], read["version"]) == (True, value, written["version"])
    assert read["expiresAt"] == written["expiresAt"]
    assert await one(api, "get", "b") == {"index": 0, "key": "b", "found": False}
    forever = await one(api, "put", "a", value=None, forever=True)
    assert forever["version"] > written["version"] and forever["expiresAt"] is None
    assert (await one(api, "get", "a"))["value"] is None
    assert (await one(api, "delete", "a", expect=written["version"]))["reason"] == "version"
    assert (await one(api, "delete", "a"))["applied"]
    assert (await one(api, "delete", "a"))["reason"] == "absent"
    assert (await put(api, "a", 1))["version"] > forever["version"]


async def test_a_write_that_expects_a_version_applies_to_that_version_alone(api: Api) -> None:
    missing = await put(api, "a", 1, expect=7)
    assert (missing["applied"], missing["reason"], missing["version"]) == (False, "absent", 0)
    assert not (await one(api, "get", "a"))["found"]
    first = await put(api, "a", 1, expect=0)
    assert (await put(api, "a", 2, expect=0))["reason"] == "exists"
    second = await put(api, "a", 2, expect=first["version"])
    late = await put(api, "a", 3, expect=first["version"])
    assert (late["applied"], late["reason"], late["value"], late["version"]) == (False, "version", 2, second["version"])
    assert (await one(api, "check", "a", expect=second["version"]))["applied"]
    assert (await one(api, "check", "a", expect=first["version"]))["reason"] == "version"
    assert (await one(api, "check", "b", expect=0))["applied"]
    assert (await one(api, "check", "b", expect=1))["reason"] == "absent"


async def test_of_many_that_put_an_absent_key_one_wins(api: Api) -> None:
    results = await asyncio.gather(*[one(api, "putIfAbsent", "a", value=n, ttlSeconds=60) for n in range(12)])
    (winner,) = [result for result in results if result["applied"]]
    assert {result["value"] for result in results} == {winner["value"]}
    assert {result["version"] for result in results} == {winner["version"]}


async def test_an_expired_key_does_not_exist_and_is_removed(api: Api, connection: Connection) -> None:
    await put(api, "a", {"not": "a number"})
    await one(api, "put", "kept", value=1, forever=True)
    await expire(connection)
    assert not (await one(api, "get", "a"))["found"]
    assert (await kv(api, {"op": "getPrefix", "prefix": "a"}))["results"][0]["rows"] == []
    counted = await one(api, "incr", "a", ttlSeconds=60)
    assert (counted["applied"], counted["value"]) == (True, 1)
    await expire(connection)
    assert api.worker is not None
    jobs: JobRunner = api.worker.broker.jobs
    await jobs.run_once()
    assert await connection.fetchval("SELECT array_agg(key) FROM queen.kv") == ["kept"]


async def test_numbers_are_added_to_within_their_bounds_and_keep_their_expiry(api: Api) -> None:
    assert (await one(api, "incr", "n", delta=10, max=5, ttlSeconds=60))["reason"] == "limit"
    assert not (await one(api, "get", "n"))["found"]
    first = await one(api, "incr", "n", delta=3, max=5, ttlSeconds=60)
    assert (first["applied"], first["value"]) == (True, 3)
    second = await one(api, "incr", "n", delta=2, max=5, forever=True)
    assert (second["value"], second["expiresAt"]) == (5, first["expiresAt"])
    refused = await one(api, "incr", "n", max=5, ttlSeconds=60)
    assert (refused["applied"], refused["reason"], refused["value"]) == (False, "limit", 5)
    assert (await one(api, "incr", "n", delta=-6, min=0, ttlSeconds=60))["reason"] == "limit"
    assert (await one(api, "incr", "n", delta=0.5, ttlSeconds=60))["value"] == 5.5
    await put(api, "text", "5")
    assert (await one(api, "incr", "text", ttlSeconds=60))["reason"] == "type"
    await asyncio.gather(*[one(api, "incr", "many", ttlSeconds=60) for _ in range(20)])
    assert (await one(api, "get", "many"))["value"] == 20


async def test_several_keys_are_read_at_once_or_by_their_beginning(api: Api) -> None:
    for key in ("p%_:1", "p%_:2", "p%_:3", "p%", "pxx:1", "q"):
        await put(api, key, key.upper())
    (many,) = (await kv(api, {"op": "getMany", "keys": ["q", "nope", "p%", "q"]}))["results"]
    assert [(row["key"], row["value"]) for row in many["rows"]] == [("q", "Q"), ("p%", "P%")]
    assert (many["missing"], many["truncated"]) == (["nope"], False)
    keys, after = [], ""
    while True:
        (page,) = (await kv(api, {"op": "getPrefix", "prefix": "p%_:", "limit": 2, "after": after}))["results"]
        keys += [row["key"] for row in page["rows"]]
        if not page["truncated"]:
            break
        after = page["nextAfter"]
        assert after == keys[-1]
    assert (keys, page["nextAfter"]) == (["p%_:1", "p%_:2", "p%_:3"], None)
    (names,) = (await kv(api, {"op": "getPrefix", "prefix": "p", "keysOnly": True, "limit": 10**6}))["results"]
    assert len(names["rows"]) == 5 and all("value" not in row for row in names["rows"])


async def test_what_does_not_fit_in_an_answer_is_said_to_be_missing_from_it(api: Api) -> None:
    for number in range(10):
        await put(api, f"big:{number}", "x" * 1_000_000)
    (many,) = (await kv(api, {"op": "getMany", "keys": [f"big:{number}" for number in range(10)]}))["results"]
    assert (len(many["rows"]), many["missing"], many["truncated"]) == (9, [], True)
    (page,) = (await kv(api, {"op": "getPrefix", "prefix": "big:"}))["results"]
    assert (len(page["rows"]), page["truncated"], page["nextAfter"]) == (9, True, "big:8")
    large = {"op": "put", "ns": NS, "key": "k", "value": "x" * (1 << 20), "ttlSeconds": 1}
    answer = await api.call("POST", "/api/v1/kv", {"operations": [large]})
    assert (answer.status, answer.body["code"]) == (400, "kv_bad_request")


async def test_the_operations_of_a_batch_see_those_before_them_and_share_their_fate(api: Api) -> None:
    body = await kv(
        api,
        {"op": "put", "key": "a", "value": 1, "ttlSeconds": 60},
        {"op": "incr", "key": "a", "delta": 2, "ttlSeconds": 60},
        {"op": "get", "key": "a"},
        {"op": "getPrefix", "prefix": "a"},
        {"op": "delete", "key": "a"},
        {"op": "get", "key": "a"},
    )
    assert body["success"] and [result["index"] for result in body["results"]] == list(range(6))
    assert (body["results"][2]["value"], body["results"][3]["rows"][0]["value"]) == (3, 3)
    assert not body["results"][5]["found"]
    lost = await kv(
        api,
        {"op": "put", "key": "b", "value": 1, "ttlSeconds": 60},
        {"op": "check", "key": "c", "expect": 9, "required": True},
    )
    assert (lost["success"], lost["reason"], lost["failedIndex"]) == (False, "kv_precondition", 1)
    assert [result["reason"] for result in lost["results"]] == ["rolledBack", "absent"]
    assert not (await one(api, "get", "b"))["found"]


async def test_keys_written_in_a_transaction_share_the_fate_of_its_messages(api: Api) -> None:
    once = {"op": "putIfAbsent", "key": "event-1", "value": True, "ttlSeconds": 60, "required": True}
    first = await commit(api, [push("out", 1)], once)
    assert first.body["success"] and [result["type"] for result in first.body["results"]] == ["push", "kv"]
    assert first.body["results"][1]["applied"]
    second = (await commit(api, [push("out", 2)], {"op": "get", "key": "event-1"}, once)).body
    assert (second["success"], second["reason"], second["kvReason"]) == (False, "kv_precondition", "exists")
    assert (second["failedIndex"], second["value"], second["results"]) == (2, True, [])
    assert second["version"] == first.body["results"][1]["version"]
    messages = await api.pop("out", batch=10)
    assert [message["data"] for message in messages] == [1]
    ack = {"type": "ack", "transactionId": "nobody", "partitionId": messages[0]["partitionId"]}
    refused = await commit(api, [ack], {"op": "put", "key": "mark", "value": 1, "ttlSeconds": 60})
    assert not refused.body["success"] and "rolled back" in refused.body["error"]
    assert not (await one(api, "get", "mark"))["found"]
    optional = {**once, "required": False}
    assert (await commit(api, [], optional, {"op": "put", "key": "mark", "value": 1, "ttlSeconds": 60})).body["success"]
    assert (await one(api, "get", "mark"))["found"]


async def test_counters_in_transactions_lose_no_step(api: Api) -> None:
    step = {"op": "incr", "key": "steps", "ttlSeconds": 60}
    answers = await asyncio.gather(*[commit(api, [push("out", n)], step) for n in range(20)])
    assert all(answer.body["success"] for answer in answers)
    assert (await one(api, "get", "steps"))["value"] == 20


async def test_deleting_a_queue_deletes_the_keys_of_its_name(api: Api) -> None:
    await api.push(NS, 1)
    await put(api, "a", 1)
    other = {"op": "put", "ns": "others", "key": "a", "value": 1, "ttlSeconds": 60}
    await kv(api, other)
    assert (await api.call("DELETE", f"/api/v1/resources/queues/{NS}")).status == 200
    assert not (await one(api, "get", "a"))["found"]
    assert (await kv(api, {"op": "get", "ns": "others", "key": "a"}))["results"][0]["found"]
