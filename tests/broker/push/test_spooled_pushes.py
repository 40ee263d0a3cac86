"""Pushes that go through the spool: away, maintenance, buffered; in order, once, under the ids that were answered."""

from __future__ import annotations

import asyncio
import random
import resource
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from queen.server.worker import Worker
from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.database import Connection, stored_messages
from tests.support.proxy import Proxy


@pytest.fixture
async def api(start_server: StartServer, proxy: Proxy) -> Api:
    """A server that reaches PostgreSQL through the proxy."""
    return await start_server(database_urls=(proxy.dsn,))


def worker_of(api: Api) -> Worker:
    assert api.worker is not None
    return api.worker


async def drained(api: Api) -> None:
    """Until nothing waits in the spool any more, and pushes go straight to PostgreSQL again."""
    await until(lambda: not worker_of(api).broker.spool.state.engaged)


async def switch(api: Api, enabled: bool, path: str = "") -> dict[str, Any]:
    answer = await api.call("POST", f"/api/v1/system/maintenance{path}", {"enabled": enabled})
    assert answer.status == 200, answer
    body: dict[str, Any] = answer.body
    return body


async def stored_ids_and_payloads(
    connection: Connection, queue: str, partition: str = "Default"
) -> list[tuple[str, bytes]]:
    return [(message.id, message.payload) for message in await stored_messages(connection, queue, partition)]


def has_lost(proxy: Proxy, answers: int) -> bool:
    return proxy.lost_answers >= answers


def is_in_maintenance(api: Api) -> bool:
    modes = worker_of(api).broker.modes
    return modes.push_maintenance and modes.pop_maintenance


async def test_a_push_while_postgres_is_away_is_buffered_and_stored_under_the_id_that_was_answered(
    api: Api, proxy: Proxy, connection: Connection
) -> None:
    (first,) = await api.push("q", "before")
    async with proxy.away(), asyncio.timeout(100):
        buffered = await api.push("q", "during", "and", ids=["t1", "t2"])
        assert [result["status"] for result in buffered] == ["buffered", "buffered"]
        assert [(r["index"], r["transaction_id"], r["queueName"], r["partition"]) for r in buffered] == [
            (0, "t1", "q", "Default"),
            (1, "t2", "q", "Default"),
        ]
    await drained(api)
    (last,) = await api.push("q", "after")
    assert last["status"] == "queued"
    ids = [result["message_id"] for result in (first, *buffered, last)]
    assert await stored_ids_and_payloads(connection, "q") == list(
        zip(ids, [b'"before"', b'"during"', b'"and"', b'"after"'], strict=True)
    )
    popped = await api.pop("q", batch=10)
    assert [message["id"] for message in popped] == ids


async def test_a_new_queue_and_partition_are_created_by_the_replay(
    api: Api, proxy: Proxy, connection: Connection
) -> None:
    async with proxy.away(), asyncio.timeout(100):
        await api.push("news.of.today", 1, partition="p")
    await drained(api)
    assert [message["data"] for message in await api.pop("news.of.today", "p")] == [1]


async def test_a_stalled_postgres_is_noticed_within_two_seconds_and_everything_is_answered(
    api: Api, proxy: Proxy, connection: Connection
) -> None:
    await api.push("q", 0, 1)
    messages = await api.pop("q")
    parked = asyncio.create_task(api.pop("other", wait=True, timeout=60_000))
    await asyncio.sleep(0.1)
    async with proxy.stalled():
        ack = {key: messages[0][key] for key in ("transactionId", "partitionId", "leaseId")}
        answers = await asyncio.gather(
            api.call("POST", "/api/v1/push", {"items": [{"queue": "q", "payload": 2, "transactionId": "t2"}]}),
            api.call("GET", "/api/v1/pop/queue/q", consumerGroup="fresh"),
            api.call("POST", "/api/v1/ack", ack),
            api.call("POST", "/api/v1/transaction", {"operations": [{"type": "push", "items": [{"queue": "q"}]}]}),
        )
        assert [answer.status for answer in answers] == [201, 503, 503, 503]
        assert answers[0].body[0]["status"] == "buffered"
        assert all(answer.headers["Retry-After"] for answer in answers[1:])
        # From now on nobody waits at all.
        assert (await api.call("GET", "/api/v1/pop/queue/q")).status == 503
        (again,) = await api.push("q", 3)
        assert again["status"] == "buffered"
        assert (await api.call("GET", "/health")).status == 503
        assert not parked.done()
    await drained(api)
    assert [payload for _, payload in await stored_ids_and_payloads(connection, "q")] == [b"0", b"1", b"2", b"3"]
    assert (await stored_messages(connection, "q"))[2].id == answers[0].body[0]["message_id"]
    await api.push("other", "wake")
    async with asyncio.timeout(100):
        assert [message["data"] for message in await parked] == ["wake"]


async def test_a_push_whose_commit_is_unknown_in_an_outage_is_stored_once(
    api: Api, proxy: Proxy, connection: Connection
) -> None:
    await api.configure("q", dedupWindowSeconds=0)
    await api.push("q", "first")
    big = "x" * 3000
    for number in range(3):
        proxy.lose_answers(1, of=lambda sent: b"PUSHED" in sent)
        payload = f"PUSHED {number} {big}"
        pushing = asyncio.create_task(api.push("q", payload, payload, ids=["same", f"t{number}"]))
        await until(partial(has_lost, proxy, number + 1))
        async with proxy.away():
            results = await pushing
        await drained(api)
        stored = await stored_messages(connection, "q")
        assert len(stored) == 1 + 2 * (number + 1)
        assert [message.id for message in stored][-2:] == [result["message_id"] for result in results]


@pytest.mark.parametrize(
    "statement, settings",
    [
        ("53100", "could not extend file"),
        ("53200", "out of memory"),
        ("25006", "cannot execute in a read-only transaction"),
    ],
)
async def test_a_postgres_that_cannot_take_the_push_lets_it_go_to_the_spool(
    api: Api, connection: Connection, statement: str, settings: str
) -> None:
    await api.push("q", 0)
    await connection.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN RAISE EXCEPTION '{settings}' USING ERRCODE = '{statement}'; END $$"
    )
    await connection.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON queen.segments FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    async with asyncio.timeout(100):
        assert (await api.push("q", 1))[0]["status"] == "buffered"
    async with asyncio.timeout(100):
        assert (await api.push("elsewhere", 2))[0]["status"] == "buffered"
    await connection.execute("DROP TRIGGER refuse ON queen.segments")
    await drained(api)
    assert [message["data"] for message in await api.pop("q", batch=5)] == [0, 1]


async def test_push_maintenance_holds_everything_back_and_keeps_the_order(api: Api, connection: Connection) -> None:
    await api.push("q", 0)
    body = await switch(api, True)
    assert body["maintenanceMode"] is True
    for number in range(1, 6):
        assert (await api.push("q", number))[0]["status"] == "buffered"
    state = (await api.call("GET", "/api/v1/system/maintenance")).body
    assert (state["maintenanceMode"], state["popMaintenanceMode"]) == (True, False)
    assert state["bufferedMessages"] == state["bufferStats"]["pendingCount"] == 5
    buffers = (await api.call("GET", "/api/v1/status/buffers")).body
    assert buffers == {"pending": 5, "failed": 0, "dbHealthy": True, "worker": 0}
    assert [message["data"] for message in await api.pop("q", batch=9, autoAck=True)] == [0]
    assert (await switch(api, False))["maintenanceMode"] is False
    results = await asyncio.gather(*(api.push("q", 6) for _ in range(1)))
    assert results[0][0]["status"] == "queued"
    assert [payload for _, payload in await stored_ids_and_payloads(connection, "q")] == [
        str(number).encode() for number in range(7)
    ]
    assert (await api.call("GET", "/api/v1/system/maintenance")).body["bufferedMessages"] == 0


async def test_maintenance_survives_a_restart_and_so_do_the_messages(start_server: StartServer) -> None:
    first = await start_server()
    await switch(first, True)
    await first.push("q", 1, 2)
    await worker_of(first).stop()
    second = await start_server()
    assert (await second.push("q", 3))[0]["status"] == "buffered"
    assert (await second.call("GET", "/api/v1/system/maintenance")).body["bufferedMessages"] == 3
    assert await second.pop("q") == []
    await switch(second, False)
    await drained(second)
    assert [message["data"] for message in await second.pop("q", batch=9)] == [1, 2, 3]


async def test_modes_reach_the_other_worker_and_the_other_host(start_server: StartServer, tmp_path: Path) -> None:
    workers = [await start_server(worker_id=number, num_workers=2) for number in range(2)]
    other_host = await start_server(queen_data_dir=tmp_path / "elsewhere")
    await switch(workers[0], True)
    await switch(workers[0], True, "/pop")
    for api in (workers[1], other_host):
        await until(partial(is_in_maintenance, api))
        assert (await api.push("q", 1))[0]["status"] == "buffered"
        assert (await api.call("GET", "/api/v1/system/maintenance/pop")).body["popMaintenanceMode"] is True


async def test_pop_maintenance_answers_empty_at_once_and_pushes_work(api: Api) -> None:
    parked = asyncio.create_task(api.pop("quiet", wait=True, timeout=60_000))
    await asyncio.sleep(0.1)
    assert (await switch(api, True, "/pop"))["popMaintenanceMode"] is True
    assert await parked == []
    assert (await api.push("q", 1))[0]["status"] == "queued"
    async with asyncio.timeout(100):
        assert await api.pop("q", wait=True, timeout=90_000) == []
    await switch(api, False, "/pop")
    assert [message["data"] for message in await api.pop("q")] == [1]


@pytest.mark.parametrize("path", ["", "/pop"])
@pytest.mark.parametrize("body", [{}, {"enabled": "yes"}, {"enabled": None}])
async def test_a_switch_needs_a_boolean(api: Api, path: str, body: dict[str, Any]) -> None:
    answer = await api.call("POST", f"/api/v1/system/maintenance{path}", body)
    assert (answer.status, answer.body) == (400, {"error": "enabled (boolean) is required"})


async def test_a_buffered_push_is_stored_when_its_time_is_up(api: Api) -> None:
    begun = time.monotonic()
    answer = await api.call("POST", "/api/v1/push", {"items": [{"queue": "q", "payload": 1}], "bufferMs": 600})
    assert (answer.status, answer.body[0]["status"]) == (201, "buffered")
    (message,) = await api.pop("q", wait=True, timeout=60_000)
    assert time.monotonic() - begun >= 0.6
    assert message["id"] == answer.body[0]["message_id"]


async def test_buffered_pushes_are_stored_when_enough_have_gathered(api: Api) -> None:
    items = [{"queue": "q", "payload": 1}]
    for _ in range(5):
        await api.call("POST", "/api/v1/push", {"items": items, "bufferMs": 60_000, "bufferMax": 5})
    await drained(api)
    assert len(await api.pop("q", batch=10)) == 5


async def test_a_plain_push_does_not_overtake_a_buffered_one(api: Api) -> None:
    items = [{"queue": "q", "payload": 1}]
    await api.call("POST", "/api/v1/push", {"items": items, "bufferMs": 60_000})
    assert (await api.push("other", 0))[0]["status"] == "queued", "partitions that do not wait are not held up"
    assert (await api.push("q", 2))[0]["status"] == "queued"
    answer = await api.call("POST", "/api/v1/push", {"items": items, "bufferMs": 60_000})
    assert answer.body[0]["status"] == "buffered"
    body = {"operations": [{"type": "push", "items": [{"queue": "q", "payload": 3}]}]}
    assert (await api.call("POST", "/api/v1/transaction", body)).body["success"] is True
    assert [message["data"] for message in await api.pop("q", batch=9)] == [1, 2, 1, 3]


@pytest.mark.parametrize("field", ["bufferMs", "bufferMax"])
@pytest.mark.parametrize("value", ["soon", -1, 1.5, True, [], 10**9])
async def test_nonsense_about_buffering_is_refused_and_nothing_is_stored(api: Api, field: str, value: Any) -> None:
    answer = await api.call("POST", "/api/v1/push", {"items": [{"queue": "q"}], field: value})
    assert answer.status == 400
    assert field in answer.body["error"]
    assert await api.pop("q") == []


async def test_a_push_in_one_batch_with_others_whose_partition_is_in_the_spool_does_not_go_there(
    api: Api, connection: Connection
) -> None:
    for partition in ("a", "b"):
        await api.push("q", 0, partition=partition)
    batcher = worker_of(api).broker.pusher.batcher
    async with connection.transaction():
        # The spool cannot be drained.
        await connection.execute("SELECT FROM queen.partitions WHERE name = 'a' FOR UPDATE")
        items = [{"queue": "q", "partition": "a", "payload": 1}]
        await api.call("POST", "/api/v1/push", {"items": items, "bufferMs": 1})
        run = batcher.batches
        first = asyncio.create_task(api.push("q", 2, partition="a"))
        await until(lambda: batcher.batches > run)
        # While it waits for the spool, these gather and are the next batch.
        results = await asyncio.gather(
            api.push("q", 3, partition="a"), api.push("q", 1, partition="b"), api.push("q", 4, partition="a")
        )
        assert [result["status"] for (result,) in results] == ["buffered", "queued", "buffered"]
        assert (await first)[0]["status"] == "buffered"
    await drained(api)
    assert sorted(message["data"] for message in await api.pop("q", "a", batch=9)) == [0, 1, 2, 3, 4]
    assert [message["data"] for message in await api.pop("q", "b", batch=9)] == [0, 1]


async def test_a_transaction_does_not_overtake_what_waits_during_maintenance(api: Api) -> None:
    await switch(api, True)
    await api.push("q", 1)
    body = {"operations": [{"type": "push", "items": [{"queue": "q", "payload": 2}]}]}
    answer = await api.call("POST", "/api/v1/transaction", body)
    assert answer.status == 503
    assert answer.headers["Retry-After"]
    body["operations"][0]["items"] = [{"queue": "free", "payload": 2}]
    assert (await api.call("POST", "/api/v1/transaction", body)).body["success"] is True


async def test_duplicates_inside_the_window_are_recognised_however_they_came(api: Api, connection: Connection) -> None:
    await api.push("q", "direct", ids=["a"])
    await switch(api, True)
    await api.push("q", "again", "new", "and again", "newer", ids=["a", "b", "b", "c"])
    buffered = await api.push("q", "third time", "newest", ids=["c", "d"])
    await switch(api, False)
    await drained(api)
    stored = await stored_messages(connection, "q")
    assert [message.transaction_id for message in stored] == ["a", "b", "c", "d"]
    assert [message.payload for message in stored] == [b'"direct"', b'"new"', b'"newer"', b'"newest"']
    assert stored[-1].id == buffered[1]["message_id"], "ids stay with their messages when others drop out"
    assert (await api.push("q", "late", ids=["d"]))[0]["status"] == "duplicate"


async def test_the_dedup_window_counts_from_when_a_message_was_accepted(
    start_server: StartServer, connection: Connection
) -> None:
    api = await start_server()
    await api.configure("q", dedupWindowSeconds=1)
    await api.push("q", "first", ids=["a"])
    await switch(api, True)
    assert (await api.push("q", "again", "other", ids=["a", "b"]))[0]["status"] == "buffered"
    await asyncio.sleep(1.5)
    # Another process replays: it knows nothing of the partition but what PostgreSQL holds.
    await worker_of(api).stop()
    api = await start_server()
    await switch(api, False)
    await drained(api)
    assert [message.payload for message in await stored_messages(connection, "q")] == [b'"first"', b'"other"']


async def test_what_a_full_queue_refuses_is_set_aside_and_stored_when_there_is_room(
    api: Api, connection: Connection, tmp_path: Path
) -> None:
    await api.configure("q", maxSize=3)
    await switch(api, True)
    results = await api.push("q", *range(5), ids=[f"t{number}" for number in range(5)])
    await api.push("q", 5, ids=["t5"])
    await switch(api, False)
    await drained(api)
    spool = worker_of(api).broker.spool
    assert [message["data"] for message in await api.pop("q", batch=9, autoAck=True)] == [0, 1, 2]
    assert spool.stats().failed_records == 2
    notes = sorted((tmp_path / "data" / "spool" / "failed").glob("*.json"))
    assert "would exceed max capacity (3)" in notes[0].read_text()
    # The end of maintenance is when what was set aside is tried again at once.
    await switch(api, True)
    await switch(api, False)
    await until(lambda: spool.stats().failed_records == 0)
    stored = await stored_messages(connection, "q")
    assert [message.transaction_id for message in stored] == [f"t{number}" for number in range(6)]
    assert [message.id for message in stored][:5] == [result["message_id"] for result in results]


async def test_what_cannot_be_encrypted_is_set_aside_and_its_neighbours_are_stored(
    api: Api, connection: Connection
) -> None:
    await switch(api, True)
    await api.push("secret", 1)
    await api.push("plain", 2)
    await connection.execute(
        "INSERT INTO queen.queues (name, encryption_enabled) VALUES ('secret', true) ON CONFLICT DO NOTHING"
    )
    await switch(api, False)
    await drained(api)
    assert [message["data"] for message in await api.pop("plain")] == [2]
    stats = worker_of(api).broker.spool.stats()
    assert (stats.failed_records, stats.messages) == (1, 0)
    assert await api.pop("secret") == []


async def test_messages_lie_encrypted_in_the_spool_when_there_is_a_key(
    start_server: StartServer, tmp_path: Path
) -> None:
    api = await start_server(queen_encryption_key="ab" * 32)
    await switch(api, True)
    await api.push("q", "a well known text")
    files = [path for path in (tmp_path / "data" / "spool").rglob("*.buf*") if path.is_file()]
    assert files
    assert not any(b"well known" in path.read_bytes() for path in files)
    await switch(api, False)
    await drained(api)
    assert [message["data"] for message in await api.pop("q")] == ["a well known text"]


async def test_a_spool_that_holds_all_it_may_refuses_with_503(start_server: StartServer, proxy: Proxy) -> None:
    api = await start_server(database_urls=(proxy.dsn,), file_buffer_max_mb=1)
    async with proxy.away():
        # Random, because what is compressed takes no room.
        texts = [f"{number:08}" + random_text(500_000, number) for number in range(8)]
        answers = [
            await api.call("POST", "/api/v1/push", {"items": [{"queue": "q", "payload": text}]}) for text in texts
        ]
    statuses = [answer.status for answer in answers]
    assert 201 in statuses
    refused = answers[statuses.index(503)]
    assert "FILE_BUFFER_MAX_MB" in refused.body["error"]
    assert refused.headers["Retry-After"]
    await drained(api)
    stored = [message["data"] for message in await api.pop("q", batch=9)]
    assert stored == [text for text, status in zip(texts, statuses, strict=True) if status == 201]


async def test_a_disk_that_is_full_refuses_with_503_and_keeps_what_was_answered(
    api: Api, proxy: Proxy, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on the size of files stands for the end of the disk: a write fails in the middle of a record."""
    caplog.set_level("INFO")
    accepted: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with proxy.away():
        accepted += [(await api.push("q", "small"))[0]["message_id"]]
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            answer = await api.call(
                "POST", "/api/v1/push", {"items": [{"queue": "q", "payload": random_text(50_000, 1)}]}
            )
            assert answer.status == 503
            assert "the spool cannot be written to" in answer.body["error"]
            assert answer.headers["Retry-After"]
            assert (await api.call("GET", "/api/v1/system/maintenance")).body["bufferHealthy"] is False
            accepted += [(await api.push("q", "small too"))[0]["message_id"]]
            assert "can be written to again" in caplog.text
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await drained(api)
    assert [message.id for message in await stored_messages(connection, "q")] == accepted


async def test_a_spool_directory_that_cannot_be_used_is_said_so_and_only_matters_when_postgres_is_away(
    start_server: StartServer, proxy: Proxy, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a directory")
    api = await start_server(database_urls=(proxy.dsn,), file_buffer_dir=str(tmp_path / "file" / "spool"))
    assert (await api.push("q", 1))[0]["status"] == "queued"
    async with proxy.away():
        answer = await api.call("POST", "/api/v1/push", {"items": [{"queue": "q"}]})
    assert answer.status == 503
    assert "cannot be used" in answer.body["error"]
    await drained(api)
    assert (await api.push("q", 2))[0]["status"] == "queued"


async def test_the_other_worker_of_the_host_does_not_overtake(
    start_server: StartServer, proxy: Proxy, dsn: str
) -> None:
    """One worker has lost PostgreSQL, the other has not."""
    cut_off = await start_server(worker_id=0, num_workers=2, database_urls=(proxy.dsn,), file_buffer_flush_ms=2000)
    healthy = await start_server(worker_id=1, num_workers=2, file_buffer_flush_ms=300)
    await cut_off.push("q", 0)
    async with proxy.away():
        assert (await cut_off.push("q", 1))[0]["status"] == "buffered"
        await healthy.push("q", 2)
    await drained(healthy)
    assert [message["data"] for message in await healthy.pop("q", batch=5)] == [0, 1, 2]


async def test_many_pushes_through_both_workers_keep_their_order(
    start_server: StartServer, proxy: Proxy, connection: Connection
) -> None:
    """A producer that goes from worker to worker, while PostgreSQL comes and goes."""
    workers = [await start_server(worker_id=number, num_workers=2, database_urls=(proxy.dsn,)) for number in range(2)]
    sent: dict[str, list[str]] = {}
    stop = asyncio.Event()

    async def produce(name: str) -> None:
        number = 0
        while not stop.is_set():
            id = f"{name}/{number}"
            answer = await workers[number % 2].push("q", number, partition=name, ids=[id])
            assert answer[0]["status"] in ("queued", "buffered")
            sent.setdefault(name, []).append(id)
            number += 1

    producers = [asyncio.create_task(produce(f"p{number}")) for number in range(4)]
    for _ in range(3):
        await asyncio.sleep(0.4)
        async with proxy.away():
            await asyncio.sleep(0.8)
    await asyncio.sleep(0.5)
    stop.set()
    await asyncio.gather(*producers)
    await drained(workers[0])
    for name, ids in sent.items():
        assert [message.transaction_id for message in await stored_messages(connection, "q", name)] == ids


def random_text(size: int, seed: int) -> str:
    return random.Random(seed).randbytes(size // 2).hex()
