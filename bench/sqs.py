"""How fast SQS is: sending, receiving and deleting as boto3 does, next to the same by the server's own API.

    python -m bench.sqs [--seconds 4] [--connections 16] [--workers 2]

Raw HTTP with the bodies that boto3 sends, without its own work (a millisecond a call or so). Every figure is messages
per second that were answered 200, and CPU time of the server and of PostgreSQL for each message. Client, server and
PostgreSQL share the machine: the figures are for comparing with each other, in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec

from bench.target import Target, fresh_server

BODY = "x" * 256
BATCH = 10
GROUPS = 100
_encode = msgspec.json.encode
_decode = msgspec.json.decode

Step = Callable[[int], Awaitable[int]]


class Clients:
    """Connections to one server."""

    def __init__(self, target: Target, session: aiohttp.ClientSession) -> None:
        self._url = f"http://{target.host}:{target.port}"
        self._session = session

    async def sqs(self, action: str, **params: Any) -> Any:
        headers = {"X-Amz-Target": f"AmazonSQS.{action}", "Content-Type": "application/x-amz-json-1.0"}
        return await self.call("POST", "/sqs/", _encode(params), headers)

    async def call(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Any:
        async with self._session.request(method, self._url + path, data=body, headers=headers) as answer:
            answer.raise_for_status()
            text = await answer.read()
        return _decode(text) if text else None

    def send(self, url: str, batch: int) -> Step:
        """Send messages, one or ten a request; to a FIFO queue, each to one of some groups."""
        fifo = url.endswith(".fifo")

        def entry(number: int) -> dict[str, str]:
            group = {"MessageGroupId": str(number % GROUPS), "MessageDeduplicationId": str(number)} if fifo else {}
            return {"MessageBody": BODY, **group}

        async def step(number: int) -> int:
            if batch == 1:
                await self.sqs("SendMessage", QueueUrl=url, **entry(number))
            else:
                entries = [{"Id": str(n), **entry(number * batch + n)} for n in range(batch)]
                await self.sqs("SendMessageBatch", QueueUrl=url, Entries=entries)
            return batch

        return step

    def receive(self, url: str) -> Step:
        """Receive up to ten and delete them."""

        async def step(number: int) -> int:
            answer = await self.sqs("ReceiveMessage", QueueUrl=url, MaxNumberOfMessages=BATCH, WaitTimeSeconds=1)
            messages = answer.get("Messages", [])
            if messages:
                entries = [{"Id": str(n), "ReceiptHandle": one["ReceiptHandle"]} for n, one in enumerate(messages)]
                await self.sqs("DeleteMessageBatch", QueueUrl=url, Entries=entries)
            return len(messages)

        return step

    def enqueue(self, batch: int) -> Step:
        body = _encode([{"namespace": "bench", "topic": "t", "data": BODY}] * batch)

        async def step(number: int) -> int:
            await self.call("POST", "/api/v1/topics/enqueue", body)
            return batch

        return step

    async def dequeue(self, number: int) -> int:
        items = await self.call("GET", f"/api/v1/topics/dequeue?namespace=bench&topic=t&limit={BATCH}&timeout=1000")
        if items:
            names = ("id", "namespace", "topic", "lease_owner")
            await self.call(
                "POST", "/api/v1/topics/ack", _encode([{name: one[name] for name in names} for one in items])
            )
        return len(items)

    def push(self, batch: int) -> Step:
        async def step(number: int) -> int:
            items = [
                {"queue": "bench", "partition": str((number * batch + n) % GROUPS), "payload": BODY}
                for n in range(batch)
            ]
            await self.call("POST", "/api/v1/push", _encode({"items": items}))
            return batch

        return step

    async def pop(self, number: int) -> int:
        answer = await self.call(
            "GET", f"/api/v1/pop/queue/bench?batch={BATCH}&partitions={BATCH}&wait=true&timeout=1000"
        )
        if answer is None:
            return 0
        names = ("transactionId", "partitionId", "leaseId")
        acks = [{name: one[name] for name in names} for one in answer["messages"]]
        await self.call("POST", "/api/v1/ack/batch", _encode({"acknowledgments": acks}))
        return len(acks)


async def measure(target: Target, name: str, step: Step, connections: int, seconds: float) -> None:
    moved = 0
    numbers = itertools.count()
    before, begun = target.watched.cpu(), time.monotonic()

    async def run() -> None:
        nonlocal moved
        while time.monotonic() - begun < seconds:
            done = await step(next(numbers))
            moved += done

    await asyncio.gather(*(run() for _ in range(connections)))
    rate = moved / (time.monotonic() - begun)
    cpu = target.watched.cpu().since(before)
    server, postgres = (spent * 1e6 / max(moved, 1) for spent in (cpu.server, cpu.postgres))
    print(f"{name:44} {rate:9,.0f}/s   {server:5.0f} + {postgres:4.0f} us", flush=True)


async def run(seconds: float, connections: int, workers: int) -> None:
    print(f"{'':44} messages     CPU of server + PostgreSQL for each")
    connector = aiohttp.TCPConnector(limit=connections)
    async with (
        fresh_server(workers, {"QUEEN_SQS": "true"}) as target,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        clients = Clients(target, session)
        standard = (await clients.sqs("CreateQueue", QueueName="bench"))["QueueUrl"]
        attributes = {"FifoQueue": "true"}
        fifo = (await clients.sqs("CreateQueue", QueueName="bench.fifo", Attributes=attributes))["QueueUrl"]
        grouped = attributes | {"DeduplicationScope": "messageGroup", "FifoThroughputLimit": "perMessageGroupId"}
        fast = (await clients.sqs("CreateQueue", QueueName="groups.fifo", Attributes=grouped))["QueueUrl"]
        steps: list[tuple[str, Step]] = [
            ("topic: enqueue, 1", clients.enqueue(1)),
            ("SQS standard: SendMessage", clients.send(standard, 1)),
            ("topic: enqueue, 10", clients.enqueue(BATCH)),
            ("SQS standard: SendMessageBatch, 10", clients.send(standard, BATCH)),
            ("topic: dequeue, ack, 10", clients.dequeue),
            ("SQS standard: receive, delete, 10", clients.receive(standard)),
            ("queue: push, 10", clients.push(BATCH)),
            ("SQS FIFO: SendMessageBatch, 10", clients.send(fifo, BATCH)),
            ("SQS FIFO, scope of the group: the same", clients.send(fast, BATCH)),
            ("queue: pop, ack, 10", clients.pop),
            ("SQS FIFO: receive, delete, 10", clients.receive(fifo)),
        ]
        for name, step in steps:
            await measure(target, name, step, connections, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    asyncio.run(run(args.seconds, args.connections, args.workers))


if __name__ == "__main__":
    main()
