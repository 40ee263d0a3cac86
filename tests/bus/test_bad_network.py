"""Datagrams are lost, forged, replayed and damaged, and hosts start late: no message is lost, no forgery accepted."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from queen.bus.packets import Heartbeat, PacketSigner, PacketWriter
from queen.bus.udp import AddressBook
from tests.bus.conftest import SECRET, Host, Ports, StartHost
from tests.bus.lossy import Lossy, lossy
from tests.support.ageing import until
from tests.support.api import payloads

Behave = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
POP: dict[str, Any] = {"wait": True, "timeout": 20_000, "autoAck": True}


async def pair_over(start_host: StartHost, network: Lossy, port: int, **settings: object) -> tuple[Host, Host]:
    """A host that sends into the network, and one that hears what comes out of it."""
    here = await start_host("here", queen_udp_peers=(f"127.0.0.1:{network.port}",), **settings)
    there = await start_host("there", queen_udp_peers=("127.0.0.1:9",), queen_udp_notify_port=port, **settings)
    return here, there


async def alive(host: Host, count: int = 1) -> None:
    async def has_heard() -> bool:
        return host.stats.servers_alive == count

    await until(has_heard)


async def dropped(host: Host, reason: str, count: int) -> None:
    async def has_dropped() -> bool:
        return host.stats.dropped.get(reason, 0) >= count

    await until(has_dropped)


@pytest.mark.parametrize("loss", [0.3, 1.0])
async def test_whatever_is_lost_everything_is_delivered_once_and_in_order(
    start_host: StartHost, udp_ports: Ports, loss: float
) -> None:
    (port,) = udp_ports.free(1)
    with lossy(port, loss) as network:
        here, there = await pair_over(start_host, network, port, pop_safety_poll_ms=200)
        got: list[int] = []

        async def consume() -> None:
            while len(got) < 100:
                messages = await there.pop("q", wait=True, timeout=60_000, batch=10)
                if messages:
                    await there.ack(messages)
                got.extend(payloads(messages))

        async with asyncio.timeout(100):
            consumer = asyncio.create_task(consume())
            for number in range(100):
                await here.push("q", number)
                await asyncio.sleep(0.005)
            await consumer
        assert got == list(range(100))
        assert network.seen
        if loss == 1.0:
            assert there.stats.packets_received == 0


async def test_replayed_and_forged_datagrams_are_dropped_and_counted(start_host: StartHost, udp_ports: Ports) -> None:
    (port,) = udp_ports.free(1)
    with lossy(port) as network:
        here, there = await pair_over(start_host, network, port, queen_sync_secret=(SECRET,))
        await alive(there)
        # What was sent before the other one listened is new to it.
        earlier = len(network.seen)
        await here.push("q", 1)
        await here.stop()
        replays = network.seen[earlier:]
        assert replays
        for frame in replays:
            network.send(frame)
        await dropped(there, "replayed", len(replays))
        heard = there.stats.events_received
        for keys, reason in (((), "unsigned"), ((b"x" * 32,), "forged")):
            writer = PacketWriter(5, PacketSigner(keys))
            network.send(writer.heartbeat(Heartbeat("intruder:1", "there")))
            for frame, _ in writer.events([("d", 0, 0, 0, 0, "q")], 1400):
                network.send(frame)
            await dropped(there, reason, 2)
        assert there.stats.events_received == heard
        assert there.stats.servers_tracked == 1
        answer = await there.call("GET", "/internal/api/inter-instance/stats")
        assert answer.body["transport"]["dropped_by_reason"] == {
            "replayed": len(replays),
            "unsigned": 2,
            "forged": 2,
        }


async def test_damaged_datagrams_are_dropped_without_harm(start_host: StartHost, udp_ports: Ports) -> None:
    (port,) = udp_ports.free(1)
    with lossy(port) as network:
        here, there = await pair_over(start_host, network, port, pop_safety_poll_ms=60_000)
        await alive(there)
        ((frame, _),) = PacketWriter(5, PacketSigner(())).events([("p", 1, 1, 0, 1, "name")], 1400)
        damaged = [
            b"",
            b"\x00",
            b"qp1",
            b"qp1\x00",
            b"qp1\x02" + frame[4:],
            frame[:-1],
            frame + b"x",
            os.urandom(1400),
            bytes(65_000),
        ]
        for data in damaged:
            network.send(data)
        await dropped(there, "malformed", len(damaged))
        # Kinds nobody knows, and things that do not exist, are no harm either.
        unknown = [("?", 1, 2, 3, 4, "x"), ("p", 99, 99, 0, 1, ""), ("f", 99, 99, 99, 1, ""), ("g", 0, 0, 0, 9, "x")]
        for frame, _ in PacketWriter(5, PacketSigner(())).events(unknown, 1400):
            network.send(frame)
        waiting = asyncio.create_task(there.pop("q", **POP))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(100):
            await here.push("q", 1)
            assert payloads(await waiting) == [1]


async def test_a_partition_that_does_not_exist_is_found_out_and_forgotten(
    start_host: StartHost, udp_ports: Ports
) -> None:
    (port,) = udp_ports.free(1)
    with lossy(port) as network:
        here, there = await pair_over(start_host, network, port, pop_safety_poll_ms=60_000)
        await here.push("q", 1)
        assert payloads(await there.pop("q", **POP)) == [1]
        queue = await there.running.broker.catalog.queue("q")
        assert queue is not None
        waiting = asyncio.create_task(there.pop("q", **POP))
        await asyncio.sleep(0.1)
        for frame, _ in PacketWriter(5, PacketSigner(())).events([("p", queue.id, 2**62, 0, 1, "")], 1400):
            network.send(frame)
        await asyncio.sleep(0.1)
        async with asyncio.timeout(100):
            await here.push("q", 2)
            assert payloads(await waiting) == [2]


async def test_a_peer_that_starts_later_is_notified_once_it_runs(
    start_host: StartHost, udp_ports: Ports, tcp_ports: Ports
) -> None:
    (udp,), (tcp,) = udp_ports.free(1), tcp_ports.free(1)
    slow = {"pop_safety_poll_ms": 60_000}
    by_udp = await start_host("udp", queen_udp_peers=(f"127.0.0.1:{udp}",), **slow)
    by_http = await start_host("http", queen_peers=(f"http://127.0.0.1:{tcp}",), **slow)
    for host in (by_udp, by_http):
        await host.push("q", 0)

    async def has_failed() -> bool:
        return by_http.stats.requests_failed > 1

    await until(has_failed)
    late = await start_host("late", port=tcp, queen_udp_peers=("127.0.0.1:9",), queen_udp_notify_port=udp, **slow)
    await alive(late, 2)
    assert len(await late.pop("q", batch=10, autoAck=True)) == 2
    for host in (by_udp, by_http):
        waiting = asyncio.create_task(late.pop("q", **POP))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(100):
            await host.push("q", 1)
            assert payloads(await waiting) == [1]


async def test_events_for_a_peer_that_is_away_are_kept_up_to_a_bound(start_host: StartHost, tcp_ports: Ports) -> None:
    (tcp,) = tcp_ports.free(1)
    host = await start_host("here", queen_peers=(f"http://127.0.0.1:{tcp}",))
    peers = host.running.broker.peers
    for number in range(15):
        peers.publish([("p", 1, partition, 0, 1, "") for partition in range(number * 1000, number * 1000 + 1000)])
        await asyncio.sleep(0)
    await dropped(host, "overflow", 5000)
    assert len(peers._http[0]._queued) <= 10_000


async def test_hosts_with_different_secrets_say_so(
    start_host: StartHost, tcp_ports: Ports, caplog: pytest.LogCaptureFixture
) -> None:
    (tcp,) = tcp_ports.free(1)
    there = await start_host("there", port=tcp, queen_sync_secret=("ab" * 32,))
    with caplog.at_level(logging.WARNING, "queen.bus.http_peer"):
        here = await start_host("here", queen_peers=(f"http://127.0.0.1:{tcp}",), queen_sync_secret=(SECRET,))
        await dropped(there, "forged", 2)
    assert "QUEEN_SYNC_SECRET must be the same on all hosts" in caplog.text
    assert here.stats.requests_failed > 0
    assert there.stats.servers_tracked == 0


async def test_a_host_that_does_not_sync_takes_nothing(start_host: StartHost, tcp_ports: Ports) -> None:
    (tcp,) = tcp_ports.free(1)
    off = await start_host("off", port=tcp, queen_sync_enabled=False, queen_peers=("http://127.0.0.1:9",))
    answer = await off.call("POST", "/internal/api/events", data=b"anything")
    assert answer.status == 409
    state = (await off.call("GET", "/internal/api/shared-state/stats")).body
    assert (state["enabled"], state["running"]) == (False, False)


@pytest.mark.parametrize("data", [b"", b"{}", b"qp1\x00\x90", b"qp1\x01" + bytes(40)])
async def test_a_posted_body_that_is_no_packet_is_refused(start_host: StartHost, data: bytes) -> None:
    host = await start_host("here", queen_peers=("http://127.0.0.1:9",))
    answer = await host.call("POST", "/internal/api/events", data=data)
    assert (answer.status, answer.body) == (400, {"error": "the body is not a packet of another Queen host"})


async def test_every_worker_of_a_host_is_notified_and_another_takes_over_the_port(
    start_host: StartHost, udp_ports: Ports
) -> None:
    (port,) = udp_ports.free(1)
    slow = {"pop_safety_poll_ms": 60_000, "queen_sync_secret": (SECRET,)}
    here = await start_host("here", queen_udp_peers=(f"127.0.0.1:{port}",), **slow)
    listens = {"num_workers": 2, "queen_udp_peers": ("127.0.0.1:9",), "queen_udp_notify_port": port, **slow}
    first = await start_host("there", worker_id=0, **listens)
    await alive(first)
    second = await start_host("there", worker_id=1, **listens)
    await alive(second)
    assert (first.stats.listening, second.stats.listening) == (True, False)
    await wakes(here, first)
    await wakes(here, second)
    await first.stop()

    async def listens_now() -> bool:
        return second.stats.listening

    await until(listens_now)
    await wakes(here, second)
    # The one that took over knows what the other has admitted: nothing of it gets in again.
    assert second.stats.dropped == {}


async def wakes(pushing: Host, popping: Host) -> None:
    waiting = asyncio.create_task(popping.pop("q", **POP))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(100):
        await pushing.push("q", 1)
        assert payloads(await waiting) == [1]


async def test_a_port_in_use_is_logged_and_bound_when_it_is_free(
    start_host: StartHost, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as foreign:
        foreign.bind(("127.0.0.1", 0))
        port = foreign.getsockname()[1]
        host = await start_host("here", queen_udp_peers=("127.0.0.1:9",), queen_udp_notify_port=port)

        async def complains() -> bool:
            return f"UDP port {port} of 127.0.0.1 could not be bound" in caplog.text

        await until(complains)
        assert not host.stats.listening

    async def listens() -> bool:
        return host.stats.listening

    await until(listens)


async def test_names_are_looked_up_again_until_they_are_found_and_when_they_move() -> None:
    places: dict[str, list[str]] = {}
    book = AddressBook(("queen-0", "queen-all:7000"), 6633, _resolver(places))
    await book.look_up()
    assert places_of(book) == []
    places["queen-0"] = ["10.0.0.1"]
    await book.look_up()
    assert places_of(book) == ["10.0.0.1:6633"]
    places["queen-0"] = ["10.0.0.2"]
    places["queen-all"] = ["10.0.0.4", "10.0.0.3", "fd00::3"]
    await book.look_up()
    assert places_of(book) == ["10.0.0.2:6633", "10.0.0.3:7000", "10.0.0.4:7000"]
    del places["queen-0"]
    places["queen-all"] = ["fd00::3"]
    await book.look_up()
    assert places_of(book) == ["10.0.0.2:6633", "[fd00::3]:7000"]


def places_of(book: AddressBook) -> list[str]:
    return [str(address) for address in book.addresses]


def _resolver(places: dict[str, list[str]]) -> Callable[..., Any]:
    async def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
        if host not in places:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET6 if ":" in place else socket.AF_INET, place) for place in places[host]]

    return resolve


async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Le")
    writer.close()


async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@pytest.mark.parametrize(
    ("behave", "why"),
    [(break_off, "connection closed before the answer"), (stay_silent, "no answer within 2 s")],
    ids=["breaks off", "silent"],
)
async def test_why_a_peer_is_unreachable_is_said(
    start_host: StartHost, caplog: pytest.LogCaptureFixture, behave: Behave, why: str
) -> None:
    async with await asyncio.start_server(behave, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with caplog.at_level(logging.WARNING, "queen.bus.http_peer"):
            here = await start_host("here", queen_peers=(f"http://127.0.0.1:{port}",))
            await until(lambda: here.stats.requests_failed)
    assert f"peer http://127.0.0.1:{port} is unreachable ({why}); retrying" in caplog.text
