"""What the server says of itself."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from queen.wire.pipelines import PipelineState, PipelineStatus, write_status
from tests.conftest import StartServer
from tests.support.api import Api


async def test_settings_in_force_say_where_they_come_from_and_hide_secrets(start_server: StartServer) -> None:
    api = await start_server(queen_encryption_key="ab" * 32, stats_cache_ms=0)
    answer = await api.call("GET", "/api/v1/system/settings")
    found = {one["variable"]: one for one in answer.body["settings"]}
    assert (found["STATS_CACHE_MS"]["value"], found["STATS_CACHE_MS"]["source"]) == ("0", "command line")
    body = found["MAX_BODY_BYTES"]
    assert (body["source"], body["default"]) == ("default", body["value"])
    assert found["QUEEN_ENCRYPTION_KEY"]["value"] == "(set, not shown)"
    assert "abab" not in str(answer.body)


async def test_shards_are_counted(api: Api) -> None:
    await api.push("q", 1, partition="a")
    await api.push("q", 1, partition="b")
    (shard,) = (await api.call("GET", "/api/v1/shards")).body["shards"]
    assert (shard["shard"], shard["up"], shard["queues"], shard["partitions"]) == (0, True, 1, 2)
    assert shard["bytes"] > 1_000_000
    assert "@" not in shard["database"]


async def test_streaming_queries_are_listed_with_their_state(api: Api) -> None:
    await api.push("orders", 1)
    registered = await api.call(
        "POST", "/streams/v1/queries", json={"name": "totals", "source_queue": "orders", "config_hash": "abc"}
    )
    places = (await api.call("GET", "/api/v1/resources/partitions?queue=orders")).body["partitions"]
    cycle = {
        "query_id": registered.body["query_id"],
        "partition_id": places[0]["id"],
        "state_ops": [{"type": "upsert", "key": key, "value": {}} for key in "xyz"],
    }
    assert (await api.call("POST", "/streams/v1/cycle", json=cycle)).body["success"]
    (query,) = (await api.call("GET", "/api/v1/streams")).body["queries"]
    assert query["queryId"] == registered.body["query_id"]
    assert (query["name"], query["sourceQueue"], query["sinkQueue"]) == ("totals", "orders", None)
    assert (query["partitions"], query["stateRows"]) == (1, 3)
    assert query["changedAt"] is not None


async def test_pipelines_are_those_that_report(api: Api, tmp_path: Path) -> None:
    assert (await api.call("GET", "/api/v1/pipelines")).body == {"pipelines": []}
    place = tmp_path / "data" / "pipelines" / "lake"
    place.mkdir(parents=True)
    status = PipelineStatus(
        name="lake", state=PipelineState.FAILED, pid=1, file="lake.yaml", master="local", started_at=time.time(),
        updated_at=time.time(), error="no such column",
    )  # fmt: skip
    write_status(place, status)
    (found,) = (await api.call("GET", "/api/v1/pipelines")).body["pipelines"]
    assert (found["name"], found["state"], found["error"]) == ("lake", "failed", "no such column")


async def test_namespaces_of_topics_are_listed(api: Api) -> None:
    for topic in ("a", "b"):
        await api.call("POST", "/api/v1/topics/enqueue", json={"namespace": "acme", "topic": topic, "data": 1})
    await api.call("PUT", "/api/v1/topics/quotas", json={"namespace": "globex", "per_minute": 9})
    await api.call("PUT", "/api/v1/topics/quotas", json={"namespace": "initech", "per_minute": 6})
    await api.call("POST", "/api/v1/topics/enqueue", json=[{"namespace": "initech", "topic": "t", "data": 1}] * 4)
    assert (await api.call("GET", "/api/v1/topics/namespaces")).body["namespaces"] == [
        _namespace("acme", topics=2),
        _namespace("globex", quota=9, used=0),
        _namespace("initech", topics=1, quota=6, used=4),
    ]


def _namespace(name: str, topics: int = 0, quota: int | None = None, used: int | None = None) -> dict[str, object]:
    limits = {"quotaPerMinute": quota, "limitPerMinute": quota, "usedLastMinute": used}
    return {"namespace": name, "topics": topics, **limits}


async def test_a_replay_is_answered_with_its_command(api: Api) -> None:
    body = {"archive": "/data/my archive", "queue": "orders", "toQueue": "again", "from": "2026-11-15T08:00:00Z"}
    answer = await api.call("POST", "/api/v1/pipelines/replay", json=body)
    assert answer.body == {
        "started": False,
        "command": "queen pipeline replay '/data/my archive' --queue orders --to again --from 2026-11-15T08:00:00.000Z",
    }


async def test_one_shard_has_nowhere_to_move_to(api: Api) -> None:
    await api.push("q", 1)
    assert (await api.call("POST", "/api/v1/shards/move", json={"queue": "q", "to": 0})).status == 409
    assert (await api.call("GET", "/api/v1/shards/moves")).body == {"moves": []}


async def test_connections_say_who_waits_for_what(api: Api) -> None:
    await api.push("q", 1)
    await api.call("GET", "/api/v1/pop/queue/q?autoAck=true")
    waiting = asyncio.create_task(api.call("GET", "/api/v1/pop/queue/q?wait=true&timeout=20000"))
    pop = "GET /api/v1/pop/queue/{queue}"
    while True:
        (peer,) = (await api.call("GET", "/api/v1/system/connections")).body["peers"]
        if peer["requests"].get(pop) == 1:
            break
        await asyncio.sleep(0.01)
    assert peer["peer"] == "127.0.0.1"
    assert peer["connections"] >= 2
    waiting.cancel()


async def test_live_counters_go_up_with_what_is_done(api: Api) -> None:
    before = (await api.call("GET", "/api/v1/live")).body
    await api.push("q", 1, 2, 3)
    await api.call("GET", "/api/v1/pop/queue/q?autoAck=true&batch=2")
    after = (await api.call("GET", "/api/v1/live")).body
    grown = {name: after[name] - before[name] for name in ("pushMessages", "popMessages", "ackMessages")}
    assert grown == {"pushMessages": 3, "popMessages": 2, "ackMessages": 2}
    assert after["poolSize"] > 0
