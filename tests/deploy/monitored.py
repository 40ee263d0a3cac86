"""A server, the load that it is under, and a Prometheus that watches it: each a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import psutil

from queen.embedded.postmaster import find_postmaster
from tests.acceptance.served import environ_without_settings
from tests.deploy.tools import tool
from tests.support.ageing import block_until
from tests.support.ports import free_port
from tests.support.workers import worker_processes

_READY_SECONDS = 100.0


class _Process:
    """A process that writes to a log, and answers at a URL once it is ready."""

    def __init__(self, directory: Path, ready_path: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / "log"
        self._ready = self.url + ready_path
        self._process: subprocess.Popen[bytes] | None = None

    def _run(self, command: Sequence[str], env: dict[str, str]) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        block_until(self._is_ready, f"{self._ready} answers", _READY_SECONDS)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(100)
            self._process = None

    def get(self, path: str, **query: str) -> Any:
        return self.call(f"{path}?{urllib.parse.urlencode(query)}")

    def post(self, path: str, body: object) -> Any:
        return self.call(path, json.dumps(body).encode())

    def delete(self, path: str) -> Any:
        return self.call(path, method="DELETE")

    def call(self, path: str, body: bytes | None = None, method: str | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=body, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=100) as answer:
            text = answer.read()
            return json.loads(text) if text else None

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"it ended with {self._process.returncode}:\n{self.log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(self._ready, timeout=5):
                return True
        except OSError:
            return False


class Server(_Process):
    """`queen serve` on a port that it keeps over restarts."""

    def __init__(self, directory: Path, **settings: str) -> None:
        super().__init__(directory, "/readyz")
        self.data = directory / "data"
        self.spool = self.data / "spool"
        self._settings = settings
        self._unlock = threading.Event()

    def start(self) -> None:
        program = str(Path(sys.executable).with_name("queen"))
        command = [program, "serve", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "2", "--data-dir", str(self.data)]
        self._run(command, environ_without_settings() | {"STATS_CACHE_MS": "0"} | self._settings)

    def workers(self) -> list[psutil.Process]:
        """The processes that serve requests."""
        assert self._process is not None
        return worker_processes(self._process.pid)

    def sql(self, statement: str) -> list[asyncpg.Record]:
        """Run a statement in the database of the server."""

        async def run() -> list[asyncpg.Record]:
            connection = await asyncpg.connect(self._dsn())
            try:
                return await connection.fetch(statement)
            finally:
                await connection.close()

        return asyncio.run(run())

    @contextmanager
    def locked(self, table: str) -> Iterator[None]:
        """Hold an exclusive lock on a table until `unlock` is called or it ends."""

        async def hold() -> None:
            connection = await asyncpg.connect(self._dsn())
            try:
                async with connection.transaction():
                    await connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
                    held.set()
                    await asyncio.to_thread(self._unlock.wait)
            finally:
                await connection.close()

        held = threading.Event()
        self._unlock.clear()
        thread = threading.Thread(target=asyncio.run, args=(hold(),), daemon=True)
        thread.start()
        held.wait()
        try:
            yield
        finally:
            self._unlock.set()
            thread.join()

    def unlock(self) -> None:
        self._unlock.set()

    def _dsn(self) -> str:
        postmaster = find_postmaster(self.data / "postgres" / "cluster")
        assert postmaster is not None
        return postmaster.dsn("postgres")

    def signal_postgres(self, number: signal.Signals) -> None:
        """Send a signal to every process of the embedded PostgreSQL."""
        assert self._process is not None
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.name() == "postgres":
                    process.send_signal(number)

    def push(self, queue: str, count: int) -> None:
        for begin in range(0, count, 1000):
            items = [{"queue": queue, "payload": number} for number in range(begin, min(begin + 1000, count))]
            self.post("/api/v1/push", {"items": items})

    def pop(self, queue: str, group: str, batch: int = 100) -> list[dict[str, Any]]:
        # 204 where there is nothing.
        found = self.get(f"/api/v1/pop/queue/{queue}", consumerGroup=group, batch=str(batch), partitions="100")
        return found["messages"] if found else []

    def ack(self, group: str, messages: list[dict[str, Any]], status: str = "completed") -> None:
        named = [
            {key: message[key] for key in ("transactionId", "partitionId", "leaseId")} | {"status": status}
            for message in messages
        ]
        self.post("/api/v1/ack/batch", {"consumerGroup": group, "acknowledgments": named})


class Redis:
    """Debian's Redis, which keeps nothing."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [tool("redis-server"), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self._directory, stdout=log, stderr=log)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Load:
    """A little of everything, again and again, until it is stopped; a server that is gone is waited for."""

    def __init__(self, server: Server, queue: str, namespaces: Iterable[str]) -> None:
        self._server, self._queue, self._namespaces = server, queue, tuple(namespaces)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        # So that their metrics exist; alerts are for what goes on.
        self._refusals = 5

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.25):
            with suppress(OSError):
                self._once()

    def _once(self) -> None:
        server = self._server
        server.push(self._queue, 3)
        messages = server.pop(self._queue, "readers")
        if messages:
            server.ack("readers", messages)
        for namespace in self._namespaces:
            server.post("/api/v1/topics/enqueue", [{"namespace": namespace, "topic": "jobs", "data": 1}])
            found = server.get("/api/v1/topics/dequeue", namespace=namespace, topic="jobs", limit="10")
            if found:
                keys = ("id", "namespace", "topic")
                server.post("/api/v1/topics/ack", [{key: item[key] for key in keys} for item in found])
        self._change_state()
        if self._refusals:
            self._refusals -= 1
            lose_lock(server)
            overfill(server)

    def _change_state(self) -> None:
        """Keys, locks, timers, ephemeral queues and conflation."""
        server, key = self._server, {"ns": "orders", "key": "k"}
        server.post("/api/v1/kv", {"operations": [{"op": "putIfAbsent", "value": 1, "forever": True} | key]})
        lock = {"name": "report", "ttlSeconds": 60}
        for operation in ({"op": "acquire", "owner": "one"}, {"op": "acquire", "owner": "two"}):
            server.post("/api/v1/locks", {"operations": [operation | lock]})
        timer = {"queue": "reminders", "timerKey": "t"}
        server.post("/api/v1/timers", {"operations": [{"op": "schedule", "payload": "MQ==", "delayMs": 0} | timer]})
        server.post("/api/v1/timers", {"operations": [{"op": "cancel"} | timer]})
        push_twice(server, "dropping", "dropOldest")
        popped = server.get("/api/v1/ephemeral/pop", queue="dropping", group="g")["messages"]
        acks = [{"id": message["id"], "status": "completed"} for message in popped]
        server.post("/api/v1/ephemeral/ack", {"queue": "dropping", "group": "g", "acks": acks})
        server.push("newest", 3)
        found = server.get("/api/v1/pop/queue/newest", consumerGroup="latest", conflation="true", partitions="10")
        if found and found["messages"]:
            server.ack("latest", found["messages"])


def lose_lock(server: Server) -> None:
    """Renew a lock that is not held."""
    renew = {"op": "renew", "name": "report", "ttlSeconds": 60, "token": 1, "slot": 0, "owner": "gone"}
    server.post("/api/v1/locks", {"operations": [renew]})


def overfill(server: Server) -> None:
    """Push more to an ephemeral queue than it takes."""
    for _ in range(2):
        with suppress(urllib.error.HTTPError):
            push_twice(server, "refusing", "reject")


def push_twice(server: Server, queue: str, policy: str) -> None:
    server.post("/api/v1/ephemeral/configure", {"queue": queue, "options": {"maxLength": 2, "policy": policy}})
    server.post("/api/v1/ephemeral/push", {"queue": queue, "messages": [{"payload": 1}] * 2})


class Prometheus(_Process):
    """Debian's Prometheus, which scrapes and evaluates twice a second."""

    def __init__(self, directory: Path, targets: Iterable[str], rules: dict[str, str]) -> None:
        super().__init__(directory, "/-/ready")
        self._directory = directory
        for name, text in rules.items():
            (directory / name).write_text(text)
        configuration = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "rule_files": list(rules),
            "scrape_configs": [
                {
                    "job_name": "queen",
                    "metrics_path": "/metrics/prometheus",
                    "static_configs": [{"targets": list(targets)}],
                }
            ],
        }
        (directory / "prometheus.yml").write_text(json.dumps(configuration))

    def start(self) -> None:
        command = [tool("prometheus"), f"--config.file={self._directory / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={self._directory / 'data'}", f"--web.listen-address=127.0.0.1:{self.port}"]
        self._run(command, {})

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query, each with `metric` and `value`."""
        try:
            answer = self.get("/api/v1/query", query=expression)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{expression}: {error.read().decode()}") from error
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """The labels of the alerts that fire, by their names."""
        found: dict[str, list[dict[str, str]]] = {}
        for alert in self.get("/api/v1/alerts")["data"]["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return found
