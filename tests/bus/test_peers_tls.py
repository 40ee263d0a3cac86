"""Hosts that tell each other over TLS, where every client has to show a certificate, peers too."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import aiohttp

from queen.cli.cert import self_signed
from tests.bus.conftest import SECRET, Host, Ports, StartHost
from tests.bus.test_peers import hear_each_other
from tests.support.ageing import until

PUSH = {"items": [{"queue": "q", "payload": 1}]}


async def test_peers_speak_tls_and_show_certificates_new_ones_too(
    start_host: StartHost, tcp_ports: Ports, tmp_path: Path
) -> None:
    paths = renew(tmp_path)
    ports = tcp_ports.free(2)
    hosts: list[Host] = []
    for name, port in zip(("here", "there"), ports, strict=True):
        host = await start_host(
            name,
            port=port,
            pop_safety_poll_ms=60_000,
            queen_sync_reconcile_ms=600_000,
            queen_sync_secret=(SECRET,),
            queen_peers=tuple(f"https://127.0.0.1:{each}" for each in ports),
            peer_ca=str(paths[0]),
            tls_cert=str(paths[0]),
            tls_key=str(paths[1]),
            tls_client_ca=str(paths[0]),
            tls_client_auth="required",
            tls_client_roles="127.0.0.1:read-write",
        )
        hosts.append(host)
    await until(lambda: hear_each_other(*hosts))
    context = ssl.create_default_context(cafile=paths[0])
    context.load_cert_chain(*paths)
    here, there = (f"https://127.0.0.1:{port}" for port in ports)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as client:
        popping = asyncio.create_task(_pop(client, there))
        parked = hosts[1].running.http.connections
        await until(lambda: any(connection.busy for connection in parked))
        async with client.post(f"{here}/api/v1/push", json=PUSH) as answer:
            assert answer.status == 201
        assert await asyncio.wait_for(popping, 100) == [1], "told by the other host: nobody polls"
    assert list(hosts[1].stats.transports) == ["http"]

    renew(tmp_path)
    for host in hosts:
        assert host.running.tls is not None
        assert host.running.tls.reload()
        for connection in tuple(host.running.http.connections):
            connection.abort()
    before = [host.stats.requests_sent for host in hosts]
    await until(lambda: all(host.stats.requests_sent > was + 1 for host, was in zip(hosts, before, strict=True)))


def renew(directory: Path) -> tuple[Path, Path]:
    """Files with a new certificate and its key."""
    paths = directory / "cert.pem", directory / "key.pem"
    for path, text in zip(paths, self_signed(["127.0.0.1"], 1), strict=True):
        path.write_bytes(text)
    return paths


async def _pop(client: aiohttp.ClientSession, url: str) -> list[int]:
    async with client.get(f"{url}/api/v1/pop/queue/q?wait=true&timeout=30000") as answer:
        return [message["data"] for message in (await answer.json())["messages"]]
