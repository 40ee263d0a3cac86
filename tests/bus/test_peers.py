"""Two hosts that know each other, by UDP, by HTTP or by both, behave as one: what one does, the other knows at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from queen.bus.udp import UdpLeader
from tests.bus.conftest import SECRET, Host, Ports, StartHost
from tests.support.ageing import until
from tests.support.api import payloads

Pair = tuple[Host, Host]


@pytest.fixture(params=["udp", "http"])
async def pair(request: pytest.FixtureRequest, start_host: StartHost, udp_ports: Ports, tcp_ports: Ports) -> Pair:
    """Without the slow poll and the change log: what happens is caused by notifications alone."""
    udp, tcp = udp_ports.free(2), tcp_ports.free(2)
    hosts = []
    for index, name in enumerate(("here", "there")):
        settings: dict[str, object] = {
            "pop_safety_poll_ms": 60_000,
            "queen_sync_reconcile_ms": 600_000,
            # A host that says nothing is not taken for dead, however busy the machine is: one that stops says so.
            "queen_sync_dead_threshold_ms": 60_000,
            "queen_sync_secret": (SECRET,),
        }
        if request.param != "http":
            # The same list at both, as a chart would give it: a host finds out which one it is.
            peers = tuple(f"127.0.0.1:{port}" for port in udp)
            settings |= {"queen_udp_peers": peers, "queen_udp_notify_port": udp[index]}
        if request.param != "udp":
            settings["queen_peers"] = tuple(f"http://127.0.0.1:{port}" for port in tcp)
        hosts.append(await start_host(name, port=tcp[index], **settings))
    here, there = hosts
    await until(lambda: hear_each_other(here, there))
    return here, there


async def hear_each_other(*hosts: Host) -> bool:
    return all(host.stats.servers_alive == len(hosts) - 1 for host in hosts)


@pytest.mark.parametrize("pair", ["both"], indirect=True)
async def test_an_event_received_by_two_transports_is_handled_once(pair: Pair) -> None:
    here, there = pair
    got: list[Any] = []
    async with asyncio.timeout(100):
        for number in range(30):
            waiting = asyncio.create_task(there.pop("q", wait=True, timeout=60_000, autoAck=True))
            await here.push("q", number)
            got += payloads(await waiting)
    assert got == list(range(30))
    assert set(there.stats.transports) == {"udp", "http"}
    assert (there.stats.servers_tracked, there.stats.dropped) == (1, {})


@pytest.mark.parametrize("partition", [None, "p"])
async def test_a_push_at_one_wakes_a_pop_parked_at_the_other(pair: Pair, partition: str | None) -> None:
    here, there = pair
    await here.push("q", 0, partition="p")
    await there.pop("q", autoAck=True)
    for number in range(10):
        waiting = asyncio.create_task(there.pop("q", partition, wait=True, timeout=20_000, autoAck=True))
        await asyncio.sleep(0.02)
        async with asyncio.timeout(100):
            await here.push("q", number, partition="p")
            assert payloads(await waiting) == [number]


async def test_the_first_push_to_a_queue_wakes_a_pop_that_waits_for_it(pair: Pair) -> None:
    here, there = pair
    waiting = asyncio.create_task(there.pop("new", wait=True, timeout=20_000))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(100):
        await here.push("new", 1)
        assert payloads(await waiting) == [1]


async def test_an_ack_at_one_wakes_a_pop_parked_at_the_other(pair: Pair) -> None:
    here, there = pair
    await here.push("q", 1, 2)
    messages = await here.pop("q")
    waiting = asyncio.create_task(there.pop("q", wait=True, timeout=20_000))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(100):
        await here.ack(messages)
        assert payloads(await waiting) == [2]


async def test_new_options_and_a_seek_reach_a_parked_pop(pair: Pair) -> None:
    here, there = pair
    await here.configure("q", delayedProcessing=3600)
    await here.push("q", 1)
    waiting = asyncio.create_task(there.pop("q", wait=True, timeout=20_000, consumerGroup="g", autoAck=True))
    await asyncio.sleep(0.2)
    async with asyncio.timeout(100):
        await here.configure("q", delayedProcessing=0)
        assert payloads(await waiting) == [1]
    waiting = asyncio.create_task(there.pop("q", wait=True, timeout=20_000, consumerGroup="g"))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(100):
        answer = await here.call(
            "POST", "/api/v1/consumer-groups/g/queues/q/seek", {"timestamp": "2020-01-01T00:00:00Z"}
        )
        assert answer.status == 200, answer
        assert payloads(await waiting) == [1]


async def test_a_note_by_hand_wakes_pops_at_both(pair: Pair, connection: Any) -> None:
    here, _ = pair
    await here.push("q", 1, partition="p")
    for host in pair:
        await host.pop("q", autoAck=True, consumerGroup=host.url)
    for body in ({"queue": "q"}, {"queue": "q", "partition": "p"}):
        pops = [asyncio.create_task(host.pop("q", wait=True, timeout=20_000, consumerGroup=host.url)) for host in pair]
        await asyncio.sleep(0.1)
        await connection.execute("UPDATE queen.cursors SET committed = 0, lease_id = NULL, lease_until = NULL")
        async with asyncio.timeout(100):
            answer = await here.call("POST", "/internal/api/notify", body)
            assert (answer.status, answer.body) == (200, {"status": "ok"})
            for host, pop in zip(pair, pops, strict=True):
                messages = await pop
                assert payloads(messages) == [1]
                await host.ack(messages, group=host.url)


async def test_a_burst_over_many_partitions_arrives_whole(pair: Pair) -> None:
    here, there = pair
    items = [{"queue": "q", "partition": f"partition-{number}", "payload": number} for number in range(2000)]
    await here.push("q", "first")
    await there.pop("q", autoAck=True)
    answer = await here.call("POST", "/api/v1/push", {"items": items})
    assert answer.status == 201
    got: Counter[int] = Counter()
    async with asyncio.timeout(100):
        while len(got) < 2000:
            messages = await there.pop("q", wait=True, timeout=60_000, batch=500, partitions=500, autoAck=True)
            got.update(payloads(messages))
    assert set(got.values()) == {1}


async def test_a_host_among_its_own_peers_does_not_talk_to_itself(pair: Pair) -> None:
    here, there = pair
    peers = here.running.broker.peers

    async def knows_itself() -> bool:
        return here.stats.own > 2 and all(peer.is_self is not None for peer in peers._http)

    await until(knows_itself)
    before = there.stats.events_received
    await here.push("q", 1)

    async def has_heard() -> bool:
        return there.stats.events_received > before

    await until(has_heard)
    assert here.stats.events_received == 0
    assert (here.stats.servers_tracked, there.stats.servers_tracked) == (1, 1)
    assert here.stats.dropped == there.stats.dropped == {}


async def test_figures_of_the_cluster_are_real(pair: Pair) -> None:
    here, there = pair
    await here.push("q", 1)
    await there.pop("q", wait=True, timeout=2000)
    for path in (
        "/api/v1/system/shared-state",
        "/internal/api/shared-state/stats",
        "/internal/api/inter-instance/stats",
    ):
        answer = await there.call("GET", path)
        assert answer.status == 200
        state = answer.body
        assert (state["enabled"], state["running"]) == (True, True)
        assert state["server_id"] != (await here.call("GET", path)).body["server_id"]
        assert state["queue_config_cache"]["size"] == 1
        assert state["queue_config_cache"]["misses"] > 0
        assert 0 <= state["queue_config_cache"]["hit_rate"] <= 1
        health = state["server_health"]
        assert (health["servers_tracked"], health["servers_alive"], health["servers_dead"]) == (1, 1, 0)
        assert health["heartbeats_received"] > 0
        assert health["restarts_detected"] == 0
        assert state["transport"]["messages_received"] > 0
        assert state["transport"]["events_received"] > 0


async def test_a_host_that_stops_is_dead_at_once_and_restarted_when_it_is_back(
    pair: Pair, start_host: StartHost
) -> None:
    here, there = pair
    await there.stop()

    async def is_dead() -> bool:
        return here.stats.servers_dead == 1

    await until(is_dead, seconds=30)
    settings = there.running.settings
    again = await start_host(
        "there-again",
        port=settings.port,
        queen_udp_peers=settings.queen_udp_peers,
        queen_udp_notify_port=settings.queen_udp_notify_port,
        queen_peers=settings.queen_peers,
        queen_sync_secret=settings.queen_sync_secret,
        pop_safety_poll_ms=60_000,
    )
    await until(lambda: hear_each_other(here, again))
    assert (here.stats.servers_tracked, here.stats.servers_dead, here.stats.restarts_detected) == (1, 0, 1)
    waiting = asyncio.create_task(again.pop("q", wait=True, timeout=20_000))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(100):
        await here.push("q", 1)
        assert payloads(await waiting) == [1]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "queue is required"),
        ({"queue": ""}, "queue must be a string of length >= 1 (at queue)"),
        ({"queue": 5}, "queue must be a string, not a whole number (at queue)"),
        ({"queue": "q", "partition": 5}, "partition must be a string or null, not a whole number (at partition)"),
        ({"queue": "q", "partition": ""}, "partition must be a string of length >= 1 (at partition)"),
        ({"queue": "x" * 256}, "queue must be a string of length <= 255 (at queue)"),
    ],
)
async def test_a_note_that_names_no_queue_is_refused(start_host: StartHost, body: Any, message: str) -> None:
    host = await start_host("here")
    answer = await host.call("POST", "/internal/api/notify", body)
    assert (answer.status, answer.body) == (400, {"error": message})
    answer = await host.call("POST", "/internal/api/notify", {"queue": "nobody knows it"})
    assert (answer.status, answer.body) == (200, {"status": "ok"})


async def test_of_several_freed_partitions_the_other_worker_gets_those_not_taken_here(pair: Pair) -> None:
    here, there = pair
    await here.configure("q", retryDelay=0)
    for partition in "abc":
        await here.push("q", 1, 2, partition=partition)
    messages = await here.pop("q", batch=6, partitions=3)
    assert len(messages) == 6
    hosts = (here, there, there)
    waiting = [asyncio.create_task(host.pop("q", wait=True, timeout=20_000)) for host in hosts]
    await asyncio.sleep(0.2)
    async with asyncio.timeout(100):
        await here.ack(messages, ["failed"] * 6)
        answers = await asyncio.gather(*waiting)
    assert [payloads(answer) for answer in answers] == [[1], [1], [1]]


def test_one_worker_of_a_directory_leads_and_none_when_it_was_removed(tmp_path: Path) -> None:
    directory = tmp_path / "runtime"
    directory.mkdir()
    one, other, late = UdpLeader(directory), UdpLeader(directory), UdpLeader(directory)
    assert one.try_acquire() and not other.try_acquire()
    one.close()
    assert other.try_acquire() and not one.try_acquire()
    for leader in (one, other):
        leader.close()
    # As a worker does that ends after its supervisor, while another one still starts.
    (directory / "udp-leader.lock").unlink()
    directory.rmdir()
    assert not late.try_acquire()
