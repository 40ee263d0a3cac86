"""A WebSocket against long polls, in one run: messages per second, CPU of the server, and push to delivery.

.venv/bin/python -m bench.websocket --help
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import msgspec

from bench.target import Target, fresh_server

_PATIENCE_SECONDS = 60


class _Message(msgspec.Struct):
    transaction_id: str = msgspec.field(name="transactionId")
    partition_id: str = msgspec.field(name="partitionId")
    lease_id: str = msgspec.field(name="leaseId")
    data: msgspec.Raw


class _Batch(msgspec.Struct):
    messages: list[_Message] = []
    type: str = ""


_decode_batch = msgspec.json.Decoder(_Batch).decode


class Consumer(Protocol):
    """Takes batches of a queue and acks them, one way or the other."""

    async def take(self) -> list[_Message]: ...

    async def ack(self, messages: list[_Message]) -> None: ...


class LongPoll:
    """A pop that waits, then an ack: two requests for each batch on a connection that stays."""

    def __init__(self, session: aiohttp.ClientSession, url: str, queue: str, batch: int) -> None:
        self._session = session
        self._pop = f"{url}/api/v1/pop/queue/{queue}?wait=true&timeout=30000&batch={batch}"
        self._ack = f"{url}/api/v1/ack/batch"

    async def take(self) -> list[_Message]:
        while True:
            async with self._session.get(self._pop) as answer:
                body = await answer.read()
            if body:
                return _decode_batch(body).messages

    async def ack(self, messages: list[_Message]) -> None:
        body = msgspec.json.encode({"acknowledgments": _acknowledgments(messages)})
        async with self._session.post(self._ack, data=body) as answer:
            await answer.read()


class Socket:
    """A subscription; each ack brings the credit for the next batch."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def take(self) -> list[_Message]:
        while True:
            received = _decode_batch(await self._socket.receive_str())
            if received.type == "batch":
                return received.messages

    async def ack(self, messages: list[_Message]) -> None:
        request = {
            "type": "ack",
            "acknowledgments": _acknowledgments(messages),
            "subscription": "s",
            "credit": 1,
        }
        await self._socket.send_str(msgspec.json.encode(request).decode())


@asynccontextmanager
async def long_poll(url: str, queue: str, batch: int) -> AsyncIterator[Consumer]:
    async with aiohttp.ClientSession() as session:
        yield LongPoll(session, url, queue, batch)


@asynccontextmanager
async def websocket(url: str, queue: str, batch: int) -> AsyncIterator[Consumer]:
    async with aiohttp.ClientSession() as session, session.ws_connect(url + "/ws/v1/consume", max_msg_size=0) as socket:
        await socket.send_json({"type": "subscribe", "id": "s", "queue": queue, "batch": batch, "credit": 1})
        yield Socket(socket)


Connect = Callable[[str, str, int], Any]
WAYS: dict[str, Connect] = {"long poll": long_poll, "websocket": websocket}


@dataclass(frozen=True)
class Drained:
    """How a backlog was consumed."""

    messages_per_second: float
    server_cpu: float
    postgres_cpu: float

    def line(self, way: str) -> str:
        return (
            f"{way:10} {self.messages_per_second:10,.0f} msg/s   "
            f"CPU per 1000 messages: server {self.server_cpu:6.2f} ms, PostgreSQL {self.postgres_cpu:6.2f} ms"
        )


async def drain(target: Target, url: str, connect: Connect, queue: str, options: argparse.Namespace) -> Drained:
    """Consume a backlog with several consumers."""
    await push_backlog(url, queue, options)
    left = options.messages
    done = asyncio.Event()

    async def consume() -> None:
        nonlocal left
        async with connect(url, queue, options.batch) as consumer:
            while left > 0:
                messages = await consumer.take()
                await consumer.ack(messages)
                left -= len(messages)
                if left <= 0:
                    done.set()

    before, began = target.watched.cpu(), time.perf_counter()
    tasks = [asyncio.create_task(consume()) for _ in range(options.consumers)]
    async with asyncio.timeout(_PATIENCE_SECONDS):
        await done.wait()
    seconds, used = time.perf_counter() - began, target.watched.cpu().since(before)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    per_thousand = 1e6 / options.messages
    return Drained(options.messages / seconds, used.server * per_thousand, used.postgres * per_thousand)


async def latencies(url: str, connect: Connect, queue: str, count: int) -> list[float]:
    """Milliseconds from sending a push to having its message, one at a time."""
    found: list[float] = []
    async with aiohttp.ClientSession() as session, connect(url, queue, 1) as consumer:
        for number in range(count + 20):
            taking = asyncio.create_task(consumer.take())
            await asyncio.sleep(0.005)
            began = time.perf_counter()
            pushing = asyncio.create_task(push(session, url, queue, ["p"], 1))
            messages = await taking
            found.append((time.perf_counter() - began) * 1000)
            await pushing
            await consumer.ack(messages)
            assert len(messages) == 1, number
    return found[20:]


async def push_backlog(url: str, queue: str, options: argparse.Namespace) -> None:
    partitions = [f"p{number}" for number in range(options.partitions)]
    async with aiohttp.ClientSession() as session:
        for _ in range(options.messages // (len(partitions) * options.batch)):
            for partition in partitions:
                await push(session, url, queue, [partition], options.batch)


async def push(session: aiohttp.ClientSession, url: str, queue: str, partitions: list[str], each: int) -> None:
    payload = {"text": "x" * 200}
    items = [
        {"queue": queue, "partition": partition, "payload": payload} for partition in partitions for _ in range(each)
    ]
    async with session.post(f"{url}/api/v1/push", data=msgspec.json.encode({"items": items})) as answer:
        assert answer.status == 201, await answer.text()


def _acknowledgments(messages: list[_Message]) -> list[dict[str, str]]:
    return [
        {"transactionId": one.transaction_id, "partitionId": one.partition_id, "leaseId": one.lease_id}
        for one in messages
    ]


async def measure(options: argparse.Namespace) -> None:
    async with fresh_server(1) as target:
        url = f"http://{target.host}:{target.port}"
        for round in range(options.rounds):
            for way, connect in WAYS.items():
                queue = f"backlog-{way.replace(' ', '-')}-{round}"
                print((await drain(target, url, connect, queue, options)).line(way), flush=True)
        for way, connect in WAYS.items():
            found = sorted(await latencies(url, connect, f"latency-{way.replace(' ', '-')}", options.pushes))
            p99 = found[int(len(found) * 0.99)]
            print(f"{way:10} push to delivery: median {statistics.median(found):.2f} ms, p99 {p99:.2f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000, help="backlog to consume")
    parser.add_argument("--partitions", type=int, default=50, help="partitions it lies in")
    parser.add_argument("--batch", type=int, default=100, help="messages of a batch")
    parser.add_argument("--consumers", type=int, default=8, help="consumers at a time")
    parser.add_argument("--pushes", type=int, default=300, help="pushes whose delivery is timed")
    parser.add_argument("--rounds", type=int, default=2)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
