"""Whole servers, each with its supervisor and two workers: processes die, and cables are pulled."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.acceptance.served import Served, served
from tests.bus.conftest import SECRET, Ports
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.workers import worker_processes

QUICK = {
    "QUEEN_SYNC_SECRET": SECRET,
    "QUEEN_SYNC_HEARTBEAT_MS": "100",
    "QUEEN_SYNC_DEAD_THRESHOLD_MS": "1000",
    "POP_SAFETY_POLL_MS": "60000",
}


async def test_when_the_worker_that_listens_is_killed_another_one_listens(
    dsn: str, tmp_path: Path, udp_ports: Ports
) -> None:
    ports = udp_ports.free(2)
    with ExitStack() as stack:
        hosts = []
        for port in ports:
            directory = tmp_path / str(port)
            directory.mkdir()
            peers = ",".join(f"127.0.0.1:{peer}" for peer in ports)
            settings = QUICK | {"QUEEN_UDP_PEERS": peers, "QUEEN_UDP_NOTIFY_PORT": str(port), "DATABASE_URLS": dsn}
            hosts.append(stack.enter_context(served(directory, **settings)))
        here, there = hosts
        await wakes(here, there)
        killed = listener(there, ports[1])
        assert killed is not None
        os.kill(killed.pid, 9)

        async def another_listens() -> bool:
            found = listener(there, ports[1])
            return found is not None and found.pid != killed.pid

        await until(another_listens)
        await wakes(here, there)


def listener(server: Served, port: int) -> psutil.Process | None:
    """The worker that has a UDP port."""
    for worker in worker_processes(server.pid):
        try:
            connections = worker.net_connections("udp")
        except psutil.Error:
            continue
        if any(connection.laddr and connection.laddr.port == port for connection in connections):
            return worker
    return None


async def wakes(pushing: Served, popping: Served) -> None:
    """A push at one wakes pops that are parked at every worker of the other."""
    here, pops = Api(pushing.url), [Api(popping.url) for _ in range(6)]
    try:
        await here.push("q", 0)
        await pops[0].pop("q", wait=True, timeout=60_000, autoAck=True)
        # Each over a connection of its own, so that they are at both workers.
        waiting = [asyncio.create_task(api.pop("q", wait=True, timeout=30_000, autoAck=True)) for api in pops]
        await asyncio.sleep(0.5)
        async with asyncio.timeout(100):
            for number in range(len(pops)):
                await here.push("q", number)
            for answer in waiting:
                assert len(await answer) == 1
    finally:
        for api in (here, *pops):
            await api.close()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def network(names: list[str]) -> Iterator[dict[str, str]]:
    """A bridge with a network namespace at each cable; gives the address of each."""
    bridge = f"qb{os.getpid() % 100_000}"
    subnet = f"10.231.{os.getpid() % 250}"
    with ExitStack() as stack:
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "del", bridge)
        ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number, name in enumerate(names, 2):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"v{name}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{subnet}.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield {name: f"{subnet}.{number}" for number, name in enumerate(names, 2)}


def why_no_namespaces() -> str:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command `ip`"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return "" if probe.returncode == 0 else f"network namespaces are not allowed here: {probe.stderr.strip()}"


@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())
async def test_a_pulled_cable_is_noticed_and_so_is_its_return(dsn: str, tmp_path: Path) -> None:
    names = [f"qa{os.getpid() % 100_000}", f"qb{os.getpid() % 100_000}"]
    with network(names) as addresses, ExitStack() as stack:
        hosts = []
        for name in names:
            directory = tmp_path / name
            directory.mkdir()
            # Every host has the same list, as in a chart: the default port, and itself among the others.
            settings = QUICK | {"QUEEN_UDP_PEERS": ",".join(addresses.values()), "DATABASE_URLS": dsn}
            prefix = ("ip", "netns", "exec", name)
            hosts.append(stack.enter_context(served(directory, host=addresses[name], prefix=prefix, **settings)))
        here, there = hosts
        api = Api(here.url)
        try:
            await until(lambda: health_is(api, alive=1))
            await wakes(here, there)
            ip("link", "set", f"v{names[1]}", "down")
            await until(lambda: health_is(api, alive=0))
            # The other is out of reach, and nobody here waits for it.
            await api.push("alone", 1)
            assert len(await api.pop("alone", autoAck=True)) == 1
            ip("link", "set", f"v{names[1]}", "up")
            await until(lambda: health_is(api, alive=1))
            assert (await health(api))["restarts_detected"] == 0
            await wakes(here, there)
        finally:
            await api.close()


async def health_is(api: Api, *, alive: int) -> bool:
    return bool((await health(api))["servers_alive"] == alive)


async def health(api: Api) -> dict[str, Any]:
    answer = await api.call("GET", "/api/v1/system/shared-state")
    found: dict[str, Any] = answer.body["server_health"]
    return found
