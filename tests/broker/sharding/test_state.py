"""Keys, timers and reads by offset on two shards: each with its queue, before and after it moves."""

from __future__ import annotations

from typing import Any

from queen.wire.shards import Name
from tests.broker.sharding.names import queue_on
from tests.broker.sharding.test_moving import move
from tests.support.api import Api

HERE, THERE = queue_on(0), queue_on(1)


async def kv(api: Api, *operations: dict[str, Any]) -> Any:
    answer = await api.call("POST", "/api/v1/kv", {"operations": operations})
    assert answer.status == 200, answer
    return answer.body["results"]


def put(ns: str, key: str, value: Any, **fields: Any) -> dict[str, Any]:
    return {"op": "put", "ns": ns, "key": key, "value": value, "ttlSeconds": 600} | fields


async def test_keys_live_and_move_with_the_queue_of_their_namespace(api: Api, dsns: tuple[str, str]) -> None:
    for _ in range(3):
        (first,) = await kv(api, put(HERE, "k", 1))
    await kv(api, put(THERE, "k", 2))
    spread = await api.call("POST", "/api/v1/kv", {"operations": [put(HERE, "k", 1), put(THERE, "k", 1)]})
    assert spread.status == 400 and "spans shards" in spread.body["error"]
    push = {"type": "push", "items": [{"queue": HERE, "payload": 1}]}
    check = {"op": "check", "ns": HERE, "key": "k", "expect": first["version"], "required": True}
    done = await api.call("POST", "/api/v1/transaction", {"operations": [push], "kv": [check]})
    assert done.body["success"], done
    apart = await api.call("POST", "/api/v1/transaction", {"operations": [push], "kv": [put(THERE, "k", 3)]})
    assert apart.status == 400 and "spans shards" in apart.body["error"]
    assert await move(dsns, Name.queue(HERE), 1)
    (found,) = await kv(api, {"op": "get", "ns": HERE, "key": "k"})
    assert (found["value"], found["version"]) == (1, first["version"])
    # Versions go on rising, though those of the other shard were lower.
    (later,) = await kv(api, put(HERE, "k", 4, expect=first["version"]))
    assert later["applied"] and later["version"] > first["version"]
    both = await kv(api, put(HERE, "k", 5), put(THERE, "k", 6))
    assert [result["applied"] for result in both] == [True, True]


async def test_keys_and_timers_of_all_shards_are_listed_in_one_order(api: Api, dsns: tuple[str, str]) -> None:
    for ns in (HERE, THERE):
        await kv(api, put(ns, "listed", 1))
    for delay, queue in ((3, HERE), (1, HERE), (2, THERE)):
        timer = {"op": "schedule", "queue": queue, "timerKey": f"listed-{delay}", "payload": "MQ=="}
        await api.call("POST", "/api/v1/timers", {"operations": [timer | {"delayMs": 600_000 + delay * 1000}]})
    for _ in range(2):
        spaces = (await api.call("GET", "/api/v1/kv", limit=100)).body["namespaces"]
        assert [one["namespace"] for one in spaces] == sorted([HERE, THERE])
        assert [one["key"] for one in (await api.call("GET", f"/api/v1/kv/{HERE}", prefix="l")).body["keys"]] == [
            "listed"
        ]
        assert (await api.call("GET", f"/api/v1/kv/{HERE}/listed")).body["value"] == 1
        due = (await api.call("GET", "/api/v1/timers", limit=2)).body
        assert [one["timerKey"] for one in due["timers"]] == ["listed-1", "listed-2"] and due["total"] == 3
        own = (await api.call("GET", "/api/v1/timers", queue=HERE)).body["timers"]
        assert [one["timerKey"] for one in own] == ["listed-1", "listed-3"]
        await move(dsns, Name.queue(HERE), 1)


async def test_offsets_of_queues_on_all_shards_are_read_at_once(api: Api, dsns: tuple[str, str]) -> None:
    await api.push(HERE, "here")
    await api.push(THERE, "there")
    asked = {"entries": [{"queue": THERE}, {"queue": "nowhere"}, {"queue": HERE}]}
    for _ in range(2):
        entries = (await api.call("POST", "/api/v1/fetch", asked)).body["entries"]
        assert [[record["payload"] for record in entry["records"]] for entry in entries] == [["there"], [], ["here"]]
        assert entries[1]["error"] == "UNKNOWN_TOPIC_OR_PARTITION"
        changed = await api.call("POST", "/api/v1/partitions/changed", asked)
        assert [len(entry["partitions"]) for entry in changed.body["entries"]] == [1, 0, 1]
        await move(dsns, Name.queue(HERE), 1)
    assert (await api.call("POST", "/api/v1/fetch", {"entries": []})).body == {"entries": []}


async def test_timers_move_with_their_queue_and_fire_there(api: Api, dsns: tuple[str, str]) -> None:
    timer = {"op": "schedule", "queue": HERE, "timerKey": "t", "payload": "MQ==", "delayMs": 600_000}
    assert (await api.call("POST", "/api/v1/timers", {"operations": [timer]})).body["results"][0]["ok"]
    assert await move(dsns, Name.queue(HERE), 1)
    assert (await api.call("GET", f"/api/v1/timers/{HERE}/t")).body["found"]
    await api.call("POST", "/api/v1/timers", {"operations": [timer | {"delayMs": 10}]})
    (message,) = await api.pop(HERE, wait=True)
    assert message["data"] == 1
    (permit,) = (
        await api.call(
            "POST", "/api/v1/locks", {"operations": [{"op": "acquire", "name": "n", "ttlSeconds": 60, "owner": "o"}]}
        )
    ).body["results"]
    assert permit["acquired"]
