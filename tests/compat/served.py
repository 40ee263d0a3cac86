"""A `queen serve` on a given data directory, and plain HTTP to it: nothing here knows the insides of the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

KEY = "5eed" * 16
SETTINGS = {
    "QUEEN_ENCRYPTION_KEY": KEY,
    # What is found must not depend on how long ago it was written.
    "DEDUP_WINDOW_SECONDS": str(2**31 - 1),
    "METRICS_RETENTION_DAYS": "36500",
    "PARTITION_CLEANUP_DAYS": "36500",
    "STATS_CACHE_MS": "0",
}
# A developer's own settings must not reach the server.
_PASSED_ON = ("PATH", "HOME", "TMPDIR", "LANG", "PYTHONPATH", "VIRTUAL_ENV")
_READY_SECONDS = 100.0


@dataclass(frozen=True)
class Http:
    """Calls to one server."""

    url: str

    def call(self, method: str, path: str, body: Any = None, **query: Any) -> tuple[int, Any]:
        """Status and decoded body of the answer to any request."""
        url = self.url + path
        if query:
            url += "?" + urllib.parse.urlencode(query)
        sent = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, sent, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read()
        return status, json.loads(text) if text else None

    def good(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """The body of an answer that says that all is well."""
        status, answer = self.call(method, path, body, **query)
        assert status in (200, 201, 204), f"{method} {path} was answered {status}: {answer}"
        return answer

    def get(self, path: str, **query: Any) -> Any:
        return self.good("GET", path, **query)

    def post(self, path: str, body: Any) -> Any:
        return self.good("POST", path, body)

    def push(self, *items: dict[str, Any]) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = self.post("/api/v1/push", {"items": list(items)})
        return results

    def pop(self, queue: str, partition: str | None = None, **query: Any) -> list[dict[str, Any]]:
        path = f"/api/v1/pop/queue/{queue}" + (f"/partition/{partition}" if partition else "")
        answer = self.get(path, **query)
        return answer["messages"] if answer else []

    def ack(
        self, messages: list[dict[str, Any]], status: str = "completed", group: str | None = None, error: str = ""
    ) -> list[dict[str, Any]]:
        acks = [
            {name: message[name] for name in ("transactionId", "partitionId", "leaseId")}
            | {"status": status, "error": error or None}
            for message in messages
        ]
        results: list[dict[str, Any]] = self.post(
            "/api/v1/ack/batch", {"acknowledgments": acks, "consumerGroup": group}
        )
        return results


@contextmanager
def serving(data_dir: Path, log: Path, **settings: str) -> Iterator[tuple[Http, subprocess.Popen[bytes]]]:
    """A server with two workers and an embedded PostgreSQL on `data_dir`; stopped at the end, if it still runs."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("queen")), "serve", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "2", "--data-dir", str(data_dir)]
    environ = {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | SETTINGS | settings
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)
    http = Http(f"http://127.0.0.1:{port}")
    try:
        _wait_until_ready(http, process, log)
        yield http, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _wait_until_ready(http: Http, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            if http.call("GET", "/readyz")[0] == 200:
                return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"`queen serve` did not become ready:\n{log.read_text()}")
        time.sleep(0.1)
