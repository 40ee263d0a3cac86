"""An update, server by server, under load: the version before the last migration runs beside this one."""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

import asyncpg

from queen.embedded import EmbeddedPostgres
from tests.deploy.tools import ROOT
from tests.faults.load import Client, Producer, answered, check_delivered, check_stored, pushing
from tests.support.ageing import until
from tests.support.host import Host
from tests.support.older_sources import older_sources


class Reader(Client):
    """Consumes for one group, and remembers in which order it was given what it acked."""

    def __init__(self, url: str, queue: str, consumed: dict[str, list[str]]) -> None:
        super().__init__(url)
        self._queue, self._consumed = queue, consumed

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            query = {"consumerGroup": "rolling", "batch": 50, "partitions": 10, "wait": True, "timeout": 300}
            answer = await self.attempt("GET", f"/api/v1/pop/queue/{self._queue}", **query)
            if answer is None:
                await asyncio.sleep(0.05)
            elif answer.body and answer.body["messages"]:
                await self._ack(answer.body["messages"])

    async def _ack(self, messages: list[dict[str, Any]]) -> None:
        keys = ("transactionId", "partitionId", "leaseId")
        named = [{key: message[key] for key in keys} for message in messages]
        await self.persist("POST", "/api/v1/ack/batch", {"consumerGroup": "rolling", "acknowledgments": named})
        for message in messages:
            self._consumed[message["partition"]].append(message["transactionId"])


async def test_servers_are_updated_one_by_one_under_load(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    older = older_sources(tmp_path)
    name = f"rolling_{uuid.uuid4().hex}"
    admin = await asyncpg.connect(postgres.dsn())
    await admin.execute(f"CREATE DATABASE {name}")
    hosts = [Host(postgres.dsn(name), tmp_path / side, workers=1) for side in ("left", "right")]
    try:
        for host in hosts:
            host.start(older)
        for host in hosts:
            await host.ready("/readyz")
        connection = await asyncpg.connect(postgres.dsn(name))
        before = await connection.fetchval("SELECT max(version) FROM queen.schema_migrations")

        producers = [Producer(host.url, f"producer-{number}", "orders") for number, host in enumerate(hosts)]
        consumed: defaultdict[str, list[str]] = defaultdict(list)
        readers = [Reader(host.url, "orders", consumed) for host in hosts]
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for reader in readers:
                group.create_task(reader.run(over))
            async with pushing(producers):
                await answered(producers, 5)
                for host in hosts:
                    await asyncio.to_thread(host.stop)
                    host.start(ROOT / "src")
                    await host.ready("/readyz")
                    await answered(producers, 10)
            everything = {
                (partition, id) for producer in producers for partition, ids in producer.answered.items() for id in ids
            }
            await until(lambda: {(part, id) for part, ids in consumed.items() for id in ids} >= everything)
            over.set()
        for reader in readers:
            await reader.close()
        assert await connection.fetchval("SELECT max(version) FROM queen.schema_migrations") > before

        await check_stored(connection, producers)
        await check_delivered(hosts[0].url, producers)
        for producer in producers:
            for partition in producer.partitions:
                own = [id for id in consumed[partition] if id.startswith(f"{producer.name}/")]
                # The answer to an ack may be lost with its server: then a message is delivered, and acked, again.
                assert list(dict.fromkeys(own)) == producer.answered[partition]
        await connection.close()
    finally:
        for host in hosts:
            await asyncio.to_thread(host.stop)
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await admin.close()
