"""An update, server by server, under load: the version before the last migration runs beside this one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tarfile
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from queen.embedded import EmbeddedPostgres
from tests.acceptance.served import environ_without_settings
from tests.deploy.tools import ROOT
from tests.faults.load import Client, Producer, answered, check_delivered, check_stored, pushing
from tests.support.ageing import until
from tests.support.ports import free_port


def older_sources(directory: Path) -> Path:
    """The sources of the commit before the one that last changed the schema."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"the history of the repository is not here: {done.stderr.strip()}")
        return done.stdout.strip()

    changed = git(
        "log", "--max-count=1", "--no-merges", "--diff-filter=A", "--format=%H", "--", "src/*/migrations/*.sql"
    )
    if not changed:
        pytest.skip("the history of the repository does not reach back to the last migration")
    archive = directory / "older.tar"
    git("archive", f"--output={archive}", f"{changed}^", "src")
    with tarfile.open(archive) as packed:
        packed.extractall(directory / "older", filter="data")
    return directory / "older" / "src"


@dataclass
class Host:
    """A `queen serve` at an address that stays, whichever sources it is run from."""

    dsn: str
    data_dir: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, sources: Path) -> None:
        self.data_dir.mkdir(exist_ok=True)
        command = [sys.executable, "-c", "from queen.cli import main; main()", "serve", "--workers", "1"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--data-dir", str(self.data_dir)]
        command += ["--database-url", self.dsn]
        environment = environ_without_settings() | {"PYTHONPATH": str(sources)}
        with (self.data_dir / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    async def ready(self) -> None:
        client = Client(self.url)
        try:
            async with asyncio.timeout(60):
                await client.persist("GET", "/readyz")
        finally:
            await client.close()

    async def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            assert await asyncio.to_thread(self.process.wait, 30) == 0, (self.data_dir / "log").read_text()[-2000:]
            self.process = None


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
    hosts = [Host(postgres.dsn(name), tmp_path / side) for side in ("left", "right")]
    try:
        for host in hosts:
            host.start(older)
        for host in hosts:
            await host.ready()
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
                    await host.stop()
                    host.start(ROOT / "src")
                    await host.ready()
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
            await host.stop()
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await admin.close()
