"""What stands before a push costs: a token, TLS, the proxy; each against the same push without it, in one run.

    python -m bench.gates [--rounds 20] [--seconds 1] [--only token,tls,proxy,login]

Rounds alternate, so that whatever else the machine does meets both. `token`: CPU of the server for each push of one
message, open and checked, and the check alone. `tls`: messages per second in pushes of 100. `proxy` and `login`: the
latency of a push of one message on one connection, in turns of 20 pushes: through the proxy, and to a server with
QUEEN_LOGIN that is sent a session or its cookie.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import operator
import random
import shutil
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import asyncpg
import uvloop
from joserfc import jwt
from joserfc.jwk import OctKey

from bench.processes import Watched
from bench.target import Target, environment_without_settings, free_port, fresh_server, make_directory, until_healthy
from queen.cli.cert import self_signed
from queen.http.auth.browser import BrowserRules
from queen.http.auth.guard import Guard
from queen.http.auth.lookup import BrokerLookup
from queen.http.server.message import Access, Request, Response, Route
from queen.proxy.users import UserStore
from queen.settings import Settings

SECRET = "a secret for a benchmark, of at least 32 bytes"
_MOST_TOKEN_MICROSECONDS = 5.0
_LEAST_TLS_SHARE = 0.85
_MOST_PROXY_MILLISECONDS = 0.3
_CALLS = 200_000
_PUSHES_IN_TURN = 20
_FIRST_PUSHES = 200


def request_of(messages: int, headers: Mapping[str, str] | None = None) -> bytes:
    """A push of so many messages as it goes over the wire."""
    payload = '{"text":"' + "x" * 240 + '"}'
    item = f'{{"queue":"bench","partition":"p","payload":{payload}}}'
    body = ('{"items":[' + ",".join([item] * messages) + "]}").encode()
    lines = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **(headers or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST /api/v1/push HTTP/1.1\r\n{head}\r\n".encode() + body


class Pusher(asyncio.Protocol):
    """Sends the same request again and again, each when the one before it was answered; or so many in its turn."""

    def __init__(self, request: bytes, *, in_turns: bool = False) -> None:
        self._request = request
        self._left = 0 if in_turns else -1
        self._turn_over = asyncio.Event()
        self._began = 0.0
        self._received = b""
        self.transport: asyncio.Transport
        self.seconds: list[float] = []
        self.trouble = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._left:
            self._send()

    async def take_turn(self, pushes: int) -> list[float]:
        """Push so often; how long each push took."""
        self.seconds, self._left = [], pushes
        self._turn_over.clear()
        self._send()
        await self._turn_over.wait()
        if self.trouble:
            raise RuntimeError(f"a push failed: {self.trouble}")
        return self.seconds

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if not end or len(rest) < int(head.lower().partition(b"content-length:")[2].split()[0]):
            return
        self.seconds.append(time.perf_counter() - self._began)
        if not head.startswith(b"HTTP/1.1 201"):
            self.trouble = self._received[:300].decode(errors="replace")
            self.transport.close()
            return
        self._received = b""
        self._left -= 1
        if self._left:
            self._send()
        else:
            self._turn_over.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.trouble = self.trouble or "the connection was closed"
        self._turn_over.set()

    def _send(self) -> None:
        self._began = time.perf_counter()
        self.transport.write(self._request)


@dataclass(frozen=True)
class Driven:
    """How many pushes were answered, and how many a second once all connections were open."""

    pushes: int
    per_second: float


async def drive(
    port: int, request: bytes, seconds: float, connections: int, tls: ssl.SSLContext | None = None
) -> Driven:
    """Push for so long."""
    loop = asyncio.get_running_loop()
    pushers = []
    for _ in range(connections):
        _, pusher = await loop.create_connection(lambda: Pusher(request), "127.0.0.1", port, ssl=tls)
        pushers.append(pusher)
    # The first connections push while others still shake hands, and a loop that is late sleeps longer than it should.
    before, began = sum(len(pusher.seconds) for pusher in pushers), time.perf_counter()
    await asyncio.sleep(seconds)
    pushes, lasted = sum(len(pusher.seconds) for pusher in pushers), time.perf_counter() - began
    if trouble := next((pusher.trouble for pusher in pushers if pusher.trouble), ""):
        raise RuntimeError(f"a push failed: {trouble}")
    for pusher in pushers:
        pusher.transport.abort()
    await asyncio.sleep(0.1)
    return Driven(pushes, (pushes - before) / lasted)


@dataclass(frozen=True)
class Verdict:
    """What was measured, and whether it is good enough."""

    line: str
    good: bool

    def print(self) -> None:
        print(f"{'ok ' if self.good else 'BAD'} {self.line}", flush=True)


def spread(values: list[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f} (rounds: {', '.join(f'{value:.{digits}f}' for value in values)})"


def paired(one: list[float], other: list[float], compare: Callable[[float, float], float]) -> float:
    """The median over the rounds: the two of a round met the machine in the same mood."""
    return statistics.median(map(compare, one, other))


def token(role: str = "read-write") -> str:
    return jwt.encode({"alg": "HS256"}, {"sub": "bench", "role": role}, OctKey.import_key(SECRET))


async def measure_token(options: argparse.Namespace) -> list[Verdict]:
    """CPU of the server for each push, open and checked."""
    guarded = {"JWT_ENABLED": "true", "JWT_SECRET": SECRET}
    plain, bearing = request_of(1), request_of(1, {"Authorization": f"Bearer {token()}"})
    costs: dict[str, list[float]] = {"open": [], "checked": []}
    async with fresh_server(1) as first, fresh_server(1, guarded) as second:
        ways: dict[str, tuple[Target, bytes]] = {"open": (first, plain), "checked": (second, bearing)}
        for target, request in ways.values():
            await drive(target.port, request, 1, 8)
        for number in range(options.rounds):
            # Whoever is second in a round meets a PostgreSQL that still writes what the first has pushed.
            for way in sorted(ways, reverse=bool(number % 2)):
                target, request = ways[way]
                before = target.watched.cpu()
                pushes = (await drive(target.port, request, options.seconds, 8)).pushes
                costs[way].append(target.watched.cpu().since(before).server / pushes * 1e6)
    added = paired(costs["checked"], costs["open"], operator.sub)
    alone = check_alone(checked=True) - check_alone(checked=False)
    return [
        Verdict(f"push, CPU µs of the server: open {spread(costs['open'])}, checked {spread(costs['checked'])}", True),
        Verdict(f"a checked push costs {added:+.1f} µs more than an open one", added <= _MOST_TOKEN_MICROSECONDS),
        Verdict(f"the check alone costs {alone:.2f} µs", alone <= _MOST_TOKEN_MICROSECONDS),
    ]


def check_alone(*, checked: bool) -> float:
    """Microseconds of CPU that the guard takes for one request."""
    settings = Settings.from_env({}, jwt_enabled=checked, jwt_secret=SECRET)
    guard = Guard.from_settings(settings, BrokerLookup(()), BrowserRules(settings))
    route = Route("POST", "/api/v1/push", lambda request: Response(200), Access.READ_WRITE)
    headers = {b"host": b"localhost", b"authorization": f"Bearer {token()}".encode()}
    request = Request("POST", "/api/v1/push", {}, {}, headers, b"", "127.0.0.1", route)
    if guard(request) is not None:
        raise RuntimeError("the guard refuses the token")
    began = time.process_time()
    for _ in range(_CALLS):
        guard(request)
    return (time.process_time() - began) / _CALLS * 1e6


async def measure_tls(options: argparse.Namespace) -> list[Verdict]:
    """Messages per second in pushes of 100, plain and over TLS."""
    directory = make_directory()
    try:
        certificate, key = self_signed(["localhost", "127.0.0.1"], 1)
        (directory / "cert.pem").write_bytes(certificate)
        (directory / "key.pem").write_bytes(key)
        for path in directory.iterdir():
            path.chmod(0o644)
        encrypted = {"TLS_CERT": str(directory / "cert.pem"), "TLS_KEY": str(directory / "key.pem")}
        context = ssl.create_default_context(cafile=directory / "cert.pem")
        request = request_of(100)
        rates: dict[str, list[float]] = {"plain": [], "TLS": []}
        async with fresh_server(1) as first, fresh_server(1, encrypted) as second:
            ways: dict[str, tuple[Target, ssl.SSLContext | None]] = {"plain": (first, None), "TLS": (second, context)}
            for target, tls in ways.values():
                await drive(target.port, request, 1, 16, tls)
            for number in range(options.rounds):
                for way in sorted(ways, reverse=bool(number % 2)):
                    target, tls = ways[way]
                    driven = await drive(target.port, request, options.seconds, 16, tls)
                    rates[way].append(driven.per_second * 100)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    share = paired(rates["TLS"], rates["plain"], operator.truediv)
    return [
        Verdict(f"push 100, messages/s: plain {spread(rates['plain'], 0)}, TLS {spread(rates['TLS'], 0)}", True),
        Verdict(f"over TLS {share:.2f} of plain", share >= _LEAST_TLS_SHARE),
    ]


@asynccontextmanager
async def proxy_before(target: Target, dsn: str) -> AsyncIterator[tuple[int, Watched]]:
    """`queen proxy` in front of a server: its port, and its process."""
    port, log = free_port(), make_directory() / "proxy.log"
    queen = Path(sys.executable).parent / "queen"
    environment = environment_without_settings() | {
        "DATABASE_URLS": dsn,
        "JWT_SECRET": SECRET,
        "HOST": "127.0.0.1",
        "PORT": str(port),
        "QUEEN_SERVER_URL": f"http://127.0.0.1:{target.port}",
    }
    process = start_proxy(queen, log, environment)
    try:
        await until_healthy("127.0.0.1", port, process, log)
        yield port, Watched(process.pid, ())
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(log.parent, ignore_errors=True)


def start_proxy(queen: Path, log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen([str(queen), "proxy"], stdout=output, stderr=output, env=environment)


async def session_of(dsn: str) -> str:
    """The token of somebody who has logged in."""
    from queen.proxy.sessions import Sessions
    from queen.proxy.settings import ProxySettings

    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        users = UserStore(pool)
        await users.prepare()
        user = await users.create("bench", None, "admin")
        return await Sessions(ProxySettings(database_url=dsn, jwt_secret=SECRET), users).begin(user, "")


async def compare(ways: Mapping[str, tuple[int, bytes]], options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """How long each push took in ms, by turns: short ones, so that what else runs here meets all ways alike."""
    loop = asyncio.get_running_loop()
    pushers = {}
    for way, (port, request) in ways.items():
        make = functools.partial(Pusher, request, in_turns=True)
        _, pushers[way] = await loop.create_connection(make, "127.0.0.1", port)
    for pusher in pushers.values():
        await pusher.take_turn(_FIRST_PUSHES)
    found: dict[str, list[list[float]]] = {way: [] for way in ways}
    order, until = list(pushers), time.monotonic() + options.rounds * options.seconds
    while time.monotonic() < until:
        random.shuffle(order)
        for way in order:
            found[way].append([one * 1000 for one in await pushers[way].take_turn(_PUSHES_IN_TURN)])
    for pusher in pushers.values():
        pusher.transport.abort()
    return found


def compared(found: Mapping[str, list[list[float]]], base: str, way: str) -> tuple[str, float]:
    """A line about both, and how much longer the median push of a turn takes."""
    all_of = {name: [one for turn in found[name] for one in turn] for name in (base, way)}
    medians = {name: statistics.median(pushes) for name, pushes in all_of.items()}
    fastest = {name: statistics.quantiles(pushes, n=10)[0] for name, pushes in all_of.items()}
    line = f"push, p50 ms: {base} {medians[base]:.3f}, {way} {medians[way]:.3f}"
    line += f"; the fastest tenth: {fastest[base]:.3f}, {fastest[way]:.3f} ({len(all_of[way])} pushes each)"
    one, other = ([statistics.median(turn) for turn in found[name]] for name in (way, base))
    return line, paired(one, other, operator.sub)


async def measure_proxy(options: argparse.Namespace) -> list[Verdict]:
    """The median latency of a push of one message, straight and through the proxy."""
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(fresh_server(1, {"JWT_ENABLED": "true", "JWT_SECRET": SECRET}))
        dsn = data_dsn(target)
        session = await session_of(dsn)
        proxy, watched = await stack.enter_async_context(proxy_before(target, dsn))
        request = request_of(1, {"Authorization": f"Bearer {session}"})
        before = watched.cpu().server
        found = await compare({"straight": (target.port, request), "proxy": (proxy, request)}, options)
        cpu = (watched.cpu().server - before) / (_FIRST_PUSHES + sum(map(len, found["proxy"]))) * 1e6
    line, added = compared(found, "straight", "proxy")
    return [
        Verdict(line, True),
        Verdict(f"the proxy adds {added:.2f} ms, of which {cpu:.0f} µs CPU", added <= _MOST_PROXY_MILLISECONDS),
    ]


async def measure_login(options: argparse.Namespace) -> list[Verdict]:
    """The median latency of a push to a server where people log in: with a token, a session, and its cookie."""
    settings = {"QUEEN_LOGIN": "true", "JWT_SECRET": SECRET}
    async with fresh_server(1, settings) as target:
        session = await session_of(data_dsn(target))
        headers = {
            "token": {"Authorization": f"Bearer {token()}"},
            "session": {"Authorization": f"Bearer {session}"},
            "cookie": {"Cookie": f"token={session}", "Origin": "http://localhost"},
        }
        ways = {way: (target.port, request_of(1, some)) for way, some in headers.items()}
        found = await compare(ways, options)
    verdicts = []
    for way in ("session", "cookie"):
        line, added = compared(found, "token", way)
        verdicts += [Verdict(line, True), Verdict(f"a {way} adds {added:.2f} ms", added <= _MOST_PROXY_MILLISECONDS)]
    return verdicts


def data_dsn(target: Target) -> str:
    assert target.database is not None
    return target.database.dsn


MEASUREMENTS = {"token": measure_token, "tls": measure_tls, "proxy": measure_proxy, "login": measure_login}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round")
    parser.add_argument("--only", default=",".join(MEASUREMENTS), help="some of token, tls, proxy, login")
    options = parser.parse_args()
    verdicts: list[Verdict] = []
    for name in options.only.split(","):
        found = uvloop.run(MEASUREMENTS[name](options))
        verdicts += found
        for verdict in found:
            verdict.print()
    sys.exit(0 if all(verdict.good for verdict in verdicts) else 1)


if __name__ == "__main__":
    main()
