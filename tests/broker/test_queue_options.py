"""Every option of a queue has its effect."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from tests.conftest import StartServer
from tests.support.ageing import Connection, age, broker_of, clean
from tests.support.api import Api


async def test_options_are_echoed_and_replaced_as_a_whole(api: Api) -> None:
    sent: dict[str, Any] = {"leaseTime": 60, "retryLimit": 5, "priority": 7, "maxSize": 5000, "deadLetterQueue": True}
    first = await api.configure("q", **sent)
    assert first["configured"]
    assert {name: first["options"][name] for name in sent} == sent
    second = await api.configure("q", dlqAfterMaxRetries=True)
    assert second["options"]["dlqAfterMaxRetries"] is True
    assert second["options"]["leaseTime"] == 300
    assert second["options"]["deadLetterQueue"] is False


class TestLeaseTime:
    async def test_messages_come_again_when_the_lease_has_ended(self, api: Api) -> None:
        await api.configure("q", leaseTime=1)
        await api.push("q", "a", "b")
        began = time.monotonic()
        first = await api.pop("q", batch=2)
        again = await api.pop("q", batch=2, wait=True, timeout=60_000)
        assert time.monotonic() - began >= 1.0
        assert [message["data"] for message in again] == ["a", "b"]
        assert again[0]["leaseId"] != first[0]["leaseId"]
        (late,) = await api.ack(first[:1])
        assert late["error"] == "Invalid or expired lease"

    async def test_a_new_lease_time_applies_to_later_pops(self, start_server: StartServer) -> None:
        """On a worker that knew the queue before, too."""
        here, there = await start_server(0, num_workers=2), await start_server(1, num_workers=2)
        await here.push("q", 1)
        await there.ack(await there.pop("q"))
        await here.configure("q", leaseTime=1)
        await here.push("q", 2)
        assert len(await there.pop("q", wait=True, timeout=60_000)) == 1
        assert len(await there.pop("q", wait=True, timeout=60_000)) == 1


class TestRetries:
    @pytest.mark.parametrize("limit", [0, 1, 2])
    async def test_a_message_is_redelivered_as_often_as_the_limit_says(
        self, api: Api, connection: Connection, limit: int
    ) -> None:
        await api.configure("q", retryLimit=limit, retryDelay=0)
        await api.push("q", "poison", ids=["p"])
        await api.push("q", "next")
        for attempt in range(limit + 1):
            (message,) = await api.pop("q")
            assert message["data"] == "poison"
            (result,) = await api.ack([message], "failed", error="no use")
            assert result["dlq"] is (attempt == limit)
        assert [message["data"] for message in await api.pop("q")] == ["next"]
        (dead,) = await connection.fetch("SELECT transaction_id, error_message, retry_count FROM queen.dead_letters")
        assert tuple(dead) == ("p", "no use", limit)

    async def test_a_batch_that_fails_as_a_whole_is_given_up_as_a_whole(self, api: Api, connection: Connection) -> None:
        await api.configure("q", retryLimit=1, retryDelay=0)
        await api.push("q", 1, 2, 3)
        results = await api.ack(await api.pop("q", batch=3), "failed")
        assert [result["dlq"] for result in results] == [False] * 3
        results = await api.ack(await api.pop("q", batch=3), "failed")
        assert [result["dlq"] for result in results] == [True] * 3
        assert await connection.fetchval("SELECT count(*) FROM queen.dead_letters") == 3

    async def test_an_expired_lease_costs_no_retry(self, api: Api, connection: Connection) -> None:
        await api.configure("q", retryLimit=1, retryDelay=0, leaseTime=1)
        await api.push("q", 1)
        for _ in range(3):
            assert len(await api.pop("q", wait=True, timeout=60_000)) == 1
        (message,) = await api.pop("q", wait=True, timeout=60_000)
        assert (await api.ack([message], "failed"))[0]["dlq"] is False

    @pytest.mark.parametrize("options", [{}, {"deadLetterQueue": False}, {"dlqAfterMaxRetries": False}])
    async def test_the_dead_letter_queue_is_always_on(
        self, api: Api, connection: Connection, options: dict[str, Any]
    ) -> None:
        await api.configure("q", retryLimit=0, **options)
        await api.push("q", 1)
        assert (await api.ack(await api.pop("q"), "failed"))[0]["dlq"]
        assert await connection.fetchval("SELECT count(*) FROM queen.dead_letters") == 1

    async def test_a_retry_comes_after_the_delay(self, api: Api) -> None:
        await api.configure("q", retryLimit=3, retryDelay=700)
        await api.push("q", 1)
        began = time.monotonic()
        await api.ack(await api.pop("q"), "failed")
        assert len(await api.pop("q", wait=True, timeout=60_000)) == 1
        assert time.monotonic() - began >= 0.7

    async def test_a_retry_comes_at_once_without_a_delay(self, api: Api) -> None:
        await api.configure("q", retryLimit=3, retryDelay=0)
        await api.push("q", 1)
        await api.ack(await api.pop("q"), "failed")
        assert len(await api.pop("q")) == 1

    async def test_the_delay_of_one_group_does_not_hold_up_another(self, api: Api) -> None:
        await api.configure("q", retryLimit=3, retryDelay=5000)
        await api.push("q", 1)
        await api.ack(await api.pop("q", consumerGroup="a"), "failed", group="a")
        assert await api.pop("q", consumerGroup="a") == []
        assert len(await api.pop("q", consumerGroup="b")) == 1


class TestMaxSize:
    async def test_what_does_not_fit_is_refused_and_the_rest_is_stored(self, api: Api) -> None:
        await api.configure("q", maxSize=3)
        await api.push("q", 1)
        results = await api.push("q", 2, 3, 4, 5)
        assert [result["status"] for result in results] == ["queued", "queued", "failed", "failed"]
        assert results[2]["error"] == "Queue 'q' would exceed max capacity (3). Current: 1, Batch: 4"
        assert [message["data"] for message in await api.pop("q", batch=10)] == [1, 2, 3]

    async def test_consuming_makes_room(self, api: Api) -> None:
        await api.configure("q", maxSize=2)
        await api.push("q", 1, 2)
        assert (await api.push("q", 3))[0]["status"] == "failed"
        await api.ack(await api.pop("q"))
        assert (await api.push("q", 3))[0]["status"] == "queued"
        assert (await api.push("q", 4))[0]["status"] == "failed"

    async def test_the_limit_is_over_all_partitions(self, api: Api) -> None:
        await api.configure("q", maxSize=2)
        items = [{"queue": "q", "partition": f"p{n}", "payload": n} for n in range(4)]
        answer = await api.call("POST", "/api/v1/push", {"items": items})
        assert sorted(result["status"] for result in answer.body) == ["failed", "failed", "queued", "queued"]
        assert (await api.push("q", 9, partition="another"))[0]["status"] == "failed"

    async def test_a_duplicate_needs_no_room(self, api: Api) -> None:
        await api.configure("q", maxSize=1)
        await api.push("q", 1, ids=["t"])
        assert (await api.push("q", 1, ids=["t"]))[0]["status"] == "duplicate"

    async def test_concurrent_pushers_never_exceed_it(self, start_server: StartServer, connection: Connection) -> None:
        servers = [await start_server(0, num_workers=2), await start_server(1, num_workers=2)]
        await servers[0].configure("q", maxSize=50)
        pushes = [servers[n % 2].push("q", *range(5), partition=f"p{n % 3}") for n in range(40)]
        results = [result for several in await asyncio.gather(*pushes) for result in several]
        assert sum(result["status"] == "queued" for result in results) == 50
        assert await connection.fetchval("SELECT sum(count) FROM queen.segments") == 50

    async def test_a_transaction_that_does_not_fit_is_refused_as_a_whole(self, api: Api) -> None:
        await api.configure("q", maxSize=1)
        items = [{"queue": "q", "payload": n} for n in range(2)]
        answer = await api.call("POST", "/api/v1/transaction", {"operations": [{"type": "push", "items": items}]})
        assert answer.body["success"] is False
        assert "max capacity" in answer.body["error"]
        assert await api.pop("q") == []


class TestTimeToLive:
    async def test_an_expired_message_is_not_delivered(self, api: Api, connection: Connection) -> None:
        await api.configure("q", ttl=10)
        await api.push("q", "old", "old too")
        await age(connection, 11)
        await api.push("q", "young")
        assert [message["data"] for message in await api.pop("q", batch=10)] == ["young"]

    async def test_an_expired_message_is_not_delivered_again(self, api: Api, connection: Connection) -> None:
        await api.configure("q", ttl=10, retryDelay=0)
        await api.push("q", 1)
        await api.ack(await api.pop("q"), "failed")
        await age(connection, 11)
        assert await api.pop("q") == []

    async def test_one_second_is_one_second(self, api: Api) -> None:
        await api.configure("q", ttl=1)
        await api.push("q", 1)
        await asyncio.sleep(1.1)
        assert await api.pop("q", autoAck=True) == []

    async def test_messages_live_forever_without_a_ttl(self, api: Api, connection: Connection) -> None:
        assert (await api.configure("q"))["options"]["ttl"] == 3600
        await api.push("q", 1)
        await age(connection, 86_400)
        await clean(api)
        assert len(await api.pop("q")) == 1


class TestPriority:
    async def test_queues_of_higher_priority_come_first(self, api: Api) -> None:
        for name, priority in (("low", 1), ("high", 9), ("middle", 5)):
            await api.configure(name, namespace="billing", task="t", priority=priority)
            await api.push(name, f"{name} 1", f"{name} 2")
        popped = [await self.pop(api, namespace="billing") for _ in range(6)]
        names = [message["data"].split()[0] for messages in popped for message in messages]
        assert names == ["high", "high", "middle", "middle", "low", "low"]

    async def test_a_changed_priority_counts_at_once(self, api: Api) -> None:
        for name in ("a", "b"):
            await api.configure(name, namespace="n", priority=1)
            await api.push(name, name)
        await api.configure("b", namespace="n", priority=2)
        assert [message["data"] for message in await self.pop(api, namespace="n")] == ["b"]

    @staticmethod
    async def pop(api: Api, **query: Any) -> list[dict[str, Any]]:
        answer = await api.call("GET", "/api/v1/pop", autoAck=True, **query)
        return answer.body["messages"] if answer.body else []


class TestDelays:
    async def test_delayed_processing_holds_each_message_back(self, api: Api, connection: Connection) -> None:
        await api.configure("q", delayedProcessing=10)
        await api.push("q", "old")
        await age(connection, 11)
        await api.push("q", "young")
        assert [message["data"] for message in await api.pop("q", batch=10, autoAck=True)] == ["old"]
        async with asyncio.timeout(100):
            assert await api.pop("q", batch=10) == []

    async def test_delayed_processing_holds_back_the_rest_of_a_push_that_a_group_stands_in(self, api: Api) -> None:
        await api.push("q", *range(4))
        assert len(await api.pop("q", batch=1, autoAck=True)) == 1
        await api.configure("q", delayedProcessing=3600)
        assert await api.pop("q", batch=10, autoAck=True) == []
        await api.call("POST", "/api/v1/consumer-groups/__QUEUE_MODE__/queues/q/seek", {"offset": 2})
        assert await api.pop("q", batch=10, autoAck=True) == []

    async def test_a_waiting_pop_gets_a_delayed_message_when_it_is_due(self, api: Api) -> None:
        await api.configure("q", delayedProcessing=1)
        began = time.monotonic()
        await api.push("q", 1)
        assert len(await api.pop("q", wait=True, timeout=60_000)) == 1
        assert time.monotonic() - began >= 1.0

    async def test_a_waiting_pop_gets_a_delayed_message_when_the_delay_is_taken_away(self, api: Api) -> None:
        await api.configure("q", delayedProcessing=3600)
        await api.push("q", 1)
        waiting = asyncio.create_task(api.pop("q", wait=True, timeout=20_000))
        assert await api.pop("q") == []
        await api.configure("q")
        assert len(await waiting) == 1

    async def test_a_window_buffer_waits_until_a_partition_is_quiet(self, api: Api) -> None:
        await api.configure("q", windowBuffer=2)
        for number in range(3):
            await asyncio.sleep(0.4)
            began = time.monotonic()
            await api.push("q", number)
            async with asyncio.timeout(100):
                assert await api.pop("q", batch=10) == []
        messages = await api.pop("q", batch=10, wait=True, timeout=60_000)
        assert [message["data"] for message in messages] == [0, 1, 2]
        assert time.monotonic() - began >= 2.0

    async def test_a_busy_partition_does_not_hold_up_a_quiet_one(self, api: Api, connection: Connection) -> None:
        await api.configure("q", windowBuffer=10)
        await api.push("q", "quiet", partition="quiet")
        await age(connection, 11)
        await api.push("q", "busy", partition="busy")
        assert [message["data"] for message in await api.pop("q", batch=10, partitions=2)] == ["quiet"]


class TestRetention:
    async def test_retention_and_waiting_time_remove_messages(self, api: Api, connection: Connection) -> None:
        await api.configure("by-age", retentionEnabled=True, retentionSeconds=10)
        await api.configure("consumed", retentionEnabled=True, completedRetentionSeconds=10)
        await api.configure("waited", maxWaitTimeSeconds=10)
        for queue in ("by-age", "consumed", "waited"):
            await api.push(queue, 1)
        await api.pop("consumed", autoAck=True)
        await age(connection, 11)
        await clean(api)
        assert await connection.fetchval("SELECT count(*) FROM queen.segments") == 0


class TestDedupWindow:
    async def test_a_window_of_zero_accepts_everything(self, api: Api) -> None:
        await api.configure("q", dedupWindowSeconds=0)
        results = [*await api.push("q", 1, 2, ids=["t", "t"]), *await api.push("q", 3, ids=["t"])]
        assert [result["status"] for result in results] == ["queued"] * 3
        assert [message["data"] for message in await api.pop("q", batch=10)] == [1, 2, 3]

    async def test_a_duplicate_is_accepted_after_the_window(self, api: Api, connection: Connection) -> None:
        await api.configure("q", dedupWindowSeconds=10)
        (first,) = await api.push("q", 1, ids=["t"])
        (duplicate,) = await api.push("q", 2, ids=["t"])
        assert (duplicate["status"], duplicate["message_id"]) == ("duplicate", first["message_id"])
        await age(connection, 11)
        (second,) = await api.push("q", 3, ids=["t"])
        assert second["status"] == "queued"
        (duplicate,) = await api.push("q", 4, ids=["t"])
        assert (duplicate["status"], duplicate["message_id"]) == ("duplicate", second["message_id"])

    async def test_the_window_of_the_server_counts_when_the_queue_has_none(
        self, start_server: StartServer, connection: Connection
    ) -> None:
        api = await start_server(dedup_window_seconds=10)
        await api.push("q", 1, ids=["t"])
        await age(connection, 11)
        assert (await api.push("q", 2, ids=["t"]))[0]["status"] == "queued"

    async def test_a_longer_window_reaches_what_was_pushed_before_it_was_set(
        self, api: Api, connection: Connection
    ) -> None:
        await api.configure("q", dedupWindowSeconds=10)
        (first,) = await api.push("q", 1, ids=["t"])
        await age(connection, 11)
        await api.configure("q", dedupWindowSeconds=100)
        (duplicate,) = await api.push("q", 2, ids=["t"])
        assert (duplicate["status"], duplicate["message_id"]) == ("duplicate", first["message_id"])

    async def test_the_same_id_may_be_used_on_every_partition(self, api: Api) -> None:
        for name in ("a", "b"):
            assert (await api.push("q", 1, partition=name, ids=["t"]))[0]["status"] == "queued"

    async def test_of_pushes_to_two_workers_at_once_one_is_accepted(
        self, start_server: StartServer, connection: Connection
    ) -> None:
        servers = [await start_server(0, num_workers=2), await start_server(1, num_workers=2)]
        await self.race(servers, connection)

    async def test_of_pushes_to_two_hosts_at_once_one_is_accepted(
        self, start_server: StartServer, connection: Connection
    ) -> None:
        """Servers that do not tell each other anything."""
        servers = [await start_server(), await start_server()]
        await self.race(servers, connection)

    async def race(self, servers: list[Api], connection: Connection) -> None:
        ids = [f"t-{number}" for number in range(20)]

        async def push_all(api: Api, partition: str) -> list[dict[str, Any]]:
            return [(await api.push("q", 1, partition=partition, ids=[id]))[0] for id in ids]

        for partition in ("a", "b"):
            answers = await asyncio.gather(*(push_all(api, partition) for api in servers for _ in range(3)))
            by_id = zip(*answers, strict=True)
            for same in by_id:
                assert sorted(result["status"] for result in same) == ["duplicate"] * 5 + ["queued"]
                assert len({result["message_id"] for result in same}) == 1
        assert await connection.fetchval("SELECT sum(count) FROM queen.segments") == 2 * len(ids)

    async def test_ids_are_known_after_a_restart(self, start_server: StartServer) -> None:
        before = await start_server()
        (first,) = await before.push("q", 1, ids=["t"])
        await before.push("q", *range(2000))
        assert before.worker is not None
        await before.worker.stop()
        after = await start_server()
        (duplicate,) = await after.push("q", 1, ids=["t"])
        assert (duplicate["status"], duplicate["message_id"]) == ("duplicate", first["message_id"])

    async def test_ids_are_known_when_memory_has_forgotten_them(self, start_server: StartServer) -> None:
        api = await start_server(dedup_memory_mb=1, dedup_disk_mb=0)
        (first,) = await api.push("q", 1, ids=["t"])
        # As many other ids as make the filter drop its oldest.
        broker_of(api).dedup.filter.add(np.random.default_rng(7).integers(1 << 63, size=2_000_000, dtype=np.uint64))
        assert broker_of(api).dedup.filter.complete_since > 0
        (duplicate,) = await api.push("q", 1, ids=["t"])
        assert (duplicate["status"], duplicate["message_id"]) == ("duplicate", first["message_id"])
