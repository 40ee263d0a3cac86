"""Attacks on a server, each with what it does to its memory and to an honest client beside it.

    python -m bench.abuse [--seconds 5] [--memory 1024] [--workers 2] [--only unread,chunks]

An honest client pushes one message at a time, over one connection and from a process of its own, from the moment that
the attack has begun. What counts: that the memory of the whole server (supervisor and workers, without PostgreSQL)
stays below `QUEEN_MEMORY_MB`, and that the honest client is served.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
import zstandard
from websockets.frames import Opcode

from bench.processes import Usage
from bench.target import Target, fresh_server
from queen.bus.packets import Heartbeat, PacketSigner, PacketWriter

Attack = Callable[["Attacker"], Awaitable[None]]
_HEAD = b"POST /api/v1/push HTTP/1.1\r\nHost: localhost\r\n"


class Attacker:
    """Opens connections, and closes them all afterwards."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self.url = url
        self._host, self._port = str(place.hostname), place.port
        self._writers: list[asyncio.StreamWriter] = []
        self.begun = asyncio.Event()
        """Set by attacks that prepare something, once they have."""

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        self._writers.append(writer)
        return reader, writer

    async def upgrade(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that has become a WebSocket."""
        reader, writer = await self.connect()
        writer.write(
            b"GET /ws/v1/consume HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        await reader.readuntil(b"\r\n\r\n")
        return reader, writer

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


async def unfinished(attacker: Attacker) -> None:
    """Bodies of 60 MB that never come to their end."""
    for _ in range(20):
        _, writer = await attacker.connect()
        writer.write(_HEAD + b"Content-Length: 62914560\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(59):
                writer.write(b"x" * (1 << 20))
                await writer.drain()
    await asyncio.Event().wait()


async def chunks(attacker: Attacker) -> None:
    """A body of 60 MB in chunks of two bytes."""
    _, writer = await attacker.connect()
    writer.write(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    piece = b"2\r\nxx\r\n" * 10_000
    with contextlib.suppress(ConnectionError):
        for _ in range(3000):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
    await asyncio.Event().wait()


async def unread(attacker: Attacker) -> None:
    """Large answers that are asked for and never read."""
    async with aiohttp.ClientSession() as session:
        for _ in range(20):
            items = [{"queue": "large", "payload": "x" * 100_000}] * 20
            async with session.post(f"{attacker.url}/api/v1/push", json={"items": items}) as answer:
                await answer.read()
    attacker.begun.set()
    for number in itertools.count():
        with contextlib.suppress(ConnectionError):
            _, writer = await attacker.connect()
            cast(asyncio.Transport, writer.transport).pause_reading()
            # Every group reads the queue from its beginning.
            target = b"/api/v1/pop/queue/large?batch=400&consumerGroup=group%d" % number
            writer.write(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
        await asyncio.sleep(0.05)


async def dequeued(attacker: Attacker) -> None:
    """Large items of a topic that are asked for and never read."""
    async with aiohttp.ClientSession() as session:
        for number in range(20):
            items = [{"namespace": "n", "topic": f"t{number}", "data": "x" * 100_000}] * 200
            async with session.post(f"{attacker.url}/api/v1/topics/enqueue", json=items) as answer:
                await answer.read()
    attacker.begun.set()
    for number in itertools.cycle(range(20)):
        with contextlib.suppress(ConnectionError):
            _, writer = await attacker.connect()
            cast(asyncio.Transport, writer.transport).pause_reading()
            target = b"/api/v1/topics/dequeue?namespace=n&topic=t%d&limit=1000" % number
            writer.write(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
        await asyncio.sleep(0.05)


async def post(attacker: Attacker, path: str, body: bytes) -> None:
    """The same request again and again, one at a time."""
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.post(attacker.url + path, data=body) as answer:
                    await answer.read()
            except aiohttp.ClientError:
                await asyncio.sleep(0.01)


async def items(attacker: Attacker) -> None:
    """Pushes of two million messages without payloads."""
    await post(attacker, "/api/v1/push", b'{"items":[' + b",".join([b'{"queue":"q"}'] * 2_100_000) + b"]}")


async def acks(attacker: Attacker) -> None:
    """A million acknowledgments of nothing in one request."""
    one = b'{"transactionId":"t","partitionId":"51756565-0000-8000-8000-000000000001"}'
    await post(attacker, "/api/v1/ack/batch", b'{"acknowledgments":[' + b",".join([one] * 800_000) + b"]}")


async def partitions(attacker: Attacker) -> None:
    """A push of as many new partitions as one may have."""
    some = [b'{"queue":"q","partition":"p%d"}' % number for number in range(100_000)]
    await post(attacker, "/api/v1/push", b'{"items":[' + b",".join(some) + b"]}")


async def refused(attacker: Attacker) -> None:
    """Pushes of a megabyte, more at a time than are stored."""
    body = b'{"items":[{"queue":"q","payload":"' + b"x" * (1 << 20) + b'"}]}'
    await asyncio.gather(*(post(attacker, "/api/v1/push", body) for _ in range(200)))


async def names(attacker: Attacker) -> None:
    """Pops of queues and groups that do not exist, each time of others, and the views that would show them."""
    async with aiohttp.ClientSession() as session:

        async def pop(part: int) -> None:
            for number in itertools.count():
                name = f"{part}-{number}"
                path = f"/api/v1/pop/queue/none-{name}?consumerGroup=group-{name}"
                async with session.get(attacker.url + path) as answer:
                    await answer.read()

        async def look() -> None:
            while True:
                for path in ("/api/v1/consumer-groups", "/api/v1/status", "/metrics/prometheus"):
                    async with session.get(attacker.url + path) as answer:
                        await answer.read()

        await asyncio.gather(look(), *(pop(part) for part in range(8)))


async def pipelined(attacker: Attacker) -> None:
    """As many requests as go, without waiting for answers."""
    reader, writer = await attacker.connect()

    async def discard() -> None:
        while await reader.read(1 << 20):
            pass

    reading = asyncio.ensure_future(discard())
    try:
        while True:
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000)
            await writer.drain()
            await asyncio.sleep(0)
    finally:
        reading.cancel()


async def forged(attacker: Attacker) -> None:
    """Signs of life of hosts that do not exist."""
    async with aiohttp.ClientSession() as session:
        boot = 0
        while True:
            boot += 1
            packet = PacketWriter(boot, PacketSigner(())).heartbeat(Heartbeat(f"host-{boot}:1", "here"))
            async with session.post(f"{attacker.url}/internal/api/events", data=packet) as answer:
                await answer.read()


async def large(attacker: Attacker) -> None:
    """Pushes of one message of 60 MB, eight at a time."""
    body = b'{"items":[{"queue":"q","payload":"' + b"x" * (60 << 20) + b'"}]}'
    await asyncio.gather(*(post(attacker, "/api/v1/push", body) for _ in range(8)))


async def bombs(attacker: Attacker) -> None:
    """Binary pushes of 10 KB that unpack to 64 MB."""
    payload = b'"' + b"x" * ((64 << 20) - 200) + b'"'
    plain = b"\x01\0\0\0\x01\0q\x01\0p\x01\0\0\0" + len(payload).to_bytes(4, "little") + payload
    body = b"QPB1\x01" + len(plain).to_bytes(4, "little") + zstandard.compress(plain)
    await asyncio.gather(*(post(attacker, "/api/v1/push", body) for _ in range(50)))


async def frames(attacker: Attacker) -> None:
    """WebSocket messages of 4 MB that never come to their end."""
    for _ in range(300):
        with contextlib.suppress(ConnectionError):
            _, writer = await attacker.upgrade()
            writer.write(_frame_head(Opcode.TEXT, 4 << 20))
            for _ in range(63):
                writer.write(bytes(1 << 16))
                await writer.drain()
    await asyncio.Event().wait()


async def fragments(attacker: Attacker) -> None:
    """A WebSocket message in fragments without content."""
    _, writer = await attacker.upgrade()
    writer.write(_frame_head(Opcode.TEXT, 0, fin=False))
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(_frame_head(Opcode.CONT, 0, fin=False) * 10_000)
            await writer.drain()
            await asyncio.sleep(0)
    await asyncio.Event().wait()


async def pings(attacker: Attacker) -> None:
    """Pings without an end, whose answers are not read."""
    _, writer = await attacker.upgrade()
    cast(asyncio.Transport, writer.transport).pause_reading()
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(_frame_head(Opcode.PING, 0) * 10_000)
            await writer.drain()
            await asyncio.sleep(0)
    await asyncio.Event().wait()


def _frame_head(opcode: Opcode, length: int, *, fin: bool = True) -> bytes:
    """The head of a masked frame whose mask changes nothing."""
    size = bytes([0x80 | length]) if length < 126 else bytes([0x80 | 127]) + length.to_bytes(8, "big")
    return bytes([(0x80 if fin else 0) | opcode]) + size + bytes(4)


async def headers(attacker: Attacker) -> None:
    """Heads of 64 KB with the same header sixteen thousand times."""

    async def send() -> None:
        while True:
            with contextlib.suppress(ConnectionError):
                reader, writer = await attacker.connect()
                writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 16_000 + b"\r\n")
                await reader.read(1 << 16)
                writer.transport.abort()

    await asyncio.gather(*(send() for _ in range(8)))


async def nested(attacker: Attacker) -> None:
    """Payloads of thirty million brackets."""
    await post(attacker, "/api/v1/push", b'{"items":[{"queue":"q","payload":' + b"[" * (30 << 20))


async def listeners(attacker: Attacker) -> None:
    """Streams of events that are asked for and never read."""
    for _ in range(500):
        with contextlib.suppress(ConnectionError):
            _, writer = await attacker.connect()
            cast(asyncio.Transport, writer.transport).pause_reading()
            writer.write(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await asyncio.Event().wait()


async def ephemeral(attacker: Attacker) -> None:
    """Messages of 100 KB to ephemeral queues, each time to another."""
    async with aiohttp.ClientSession() as session:

        async def push(part: int) -> None:
            for number in itertools.count():
                body = {"queue": f"e-{part}-{number}", "messages": [{"payload": "x" * 100_000}] * 10}
                async with session.post(f"{attacker.url}/api/v1/ephemeral/push", json=body) as answer:
                    await answer.read()

        await asyncio.gather(*(push(part) for part in range(4)))


async def state(attacker: Attacker) -> None:
    """Keys, locks and timers, each time others."""
    async with aiohttp.ClientSession() as session:

        async def write(part: int) -> None:
            for number in itertools.count():
                name = f"{part}-{number}"
                puts = [
                    {"op": "put", "ns": f"n-{name}-{one}", "key": "k", "value": 1, "ttlSeconds": 60}
                    for one in range(50)
                ]
                locks = [
                    {"op": "acquire", "name": f"l-{name}-{one}", "owner": "o", "ttlSeconds": 60} for one in range(50)
                ]
                timers = [
                    {"op": "schedule", "queue": f"t-{name}", "timerKey": f"{one}", "payload": "MQ==", "delayMs": 60_000}
                    for one in range(50)
                ]
                for kind, operations in (("kv", puts), ("locks", locks), ("timers", timers)):
                    async with session.post(f"{attacker.url}/api/v1/{kind}", json={"operations": operations}) as answer:
                        await answer.read()

        await asyncio.gather(*(write(part) for part in range(8)))


async def values(attacker: Attacker) -> None:
    """Small requests that ask for hundreds of megabytes: of keys, of items and of dead letters."""
    large = "x" * 1_000_000
    async with aiohttp.ClientSession() as session:
        for number in range(100):
            put = {"op": "put", "ns": "n", "key": f"k{number}", "value": large, "forever": True}
            for path, body in (
                ("/api/v1/kv", {"operations": [put]}),
                ("/api/v1/topics/enqueue", [{"namespace": "n", "topic": "t", "data": large}]),
                ("/api/v1/push", {"items": [{"queue": "dead", "payload": large}]}),
            ):
                async with session.post(attacker.url + path, json=body) as answer:
                    await answer.read()
        dead: dict[str, Any] = {"queue": "dead", "filter": {}, "limit": 1000}
        while dead.get("cursor", "") is not None:
            async with session.post(f"{attacker.url}/api/v1/messages/dlq", json=dead) as answer:
                dead["cursor"] = (await answer.json())["cursor"]
    attacker.begun.set()
    reading = {"operations": [{"op": "getPrefix", "ns": "n", "prefix": "k", "limit": 1000}] * 50}

    async def look(path: str) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(attacker.url + path) as answer:
                        await answer.read()

    await asyncio.gather(
        *(post(attacker, "/api/v1/kv", json.dumps(reading).encode()) for _ in range(8)),
        *(look("/api/v1/topics/peek?namespace=n&topic=t&limit=1000") for _ in range(8)),
        *(look("/api/v1/dlq?queue=dead&limit=1000") for _ in range(8)),
    )


async def connections(attacker: Attacker) -> None:
    """Connections that ask nothing."""
    for _ in range(5000):
        with contextlib.suppress(OSError):
            await attacker.connect()
    await asyncio.Event().wait()


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        unfinished,
        chunks,
        unread,
        dequeued,
        items,
        acks,
        partitions,
        refused,
        names,
        pipelined,
        forged,
        large,
        bombs,
        frames,
        fragments,
        pings,
        headers,
        nested,
        listeners,
        ephemeral,
        state,
        values,
        connections,
    )
}


PREPARED: frozenset[Attack] = frozenset({unread, dequeued, values})


async def honest(url: str, seconds: float) -> tuple[list[float], int]:
    """Latencies of pushes in milliseconds, and how many were not answered 201, as a process of its own has them."""
    command = (sys.executable, "-m", "bench.abuse", "--honest", url, "--seconds", str(seconds))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    took, failed = json.loads(printed)
    return took, failed


async def push_honestly(url: str, seconds: float) -> tuple[list[float], int]:
    body = {"items": [{"queue": "honest", "payload": {"n": 1}}]}
    took: list[float] = []
    failed = 0
    until = time.perf_counter() + seconds
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        while (began := time.perf_counter()) < until:
            try:
                async with session.post(f"{url}/api/v1/push", json=body) as answer:
                    await answer.read()
                    failed += answer.status != 201
            except (aiohttp.ClientError, TimeoutError):
                failed += 1
            took.append((time.perf_counter() - began) * 1000)
    return took, failed


async def measure(target: Target, attack: Attack | None, seconds: float) -> tuple[list[float], int, int]:
    """The honest client's latencies and failures, and the most memory of the server meanwhile, in MB."""
    url = f"http://{target.host}:{target.port}"
    usage, attacker = Usage(target.watched), Attacker(url)
    tasks = [asyncio.ensure_future(usage.watch_memory())]
    if attack is not None:
        tasks.append(asyncio.ensure_future(attack(attacker)))
    try:
        if attack in PREPARED:
            await attacker.begun.wait()
        took, failed = await honest(url, seconds)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        attacker.close()
    return took, failed, usage.peak_memory_bytes >> 20


async def run(options: argparse.Namespace) -> None:
    settings = {"QUEEN_MEMORY_MB": str(options.memory), "HOST": "127.0.0.1"}
    names = options.only.split(",") if options.only else list(ATTACKS)
    print(f"{'attack':12} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8} {'pushes':>7} {'failed':>7} {'memory MB':>10}")
    for name in ("(none)", *names):
        async with fresh_server(options.workers, settings) as target:
            took, failed, memory = await measure(target, ATTACKS.get(name), options.seconds)
        p99 = statistics.quantiles(took, n=100)[98] if len(took) > 1 else took[0]
        print(
            f"{name:12} {statistics.median(took):8.2f} {p99:8.2f} {max(took):8.2f} {len(took):7} {failed:7} {memory:10}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--memory", type=int, default=1024, help="QUEEN_MEMORY_MB")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help=", ".join(ATTACKS))
    parser.add_argument("--honest", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.honest:
        print(json.dumps(asyncio.run(push_honestly(options.honest, options.seconds))))
    else:
        asyncio.run(run(options))


if __name__ == "__main__":
    main()
