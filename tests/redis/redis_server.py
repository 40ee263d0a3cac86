"""A real redis-server of the test's own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import redis.exceptions

from tests.support.ageing import until
from tests.support.ports import free_port


class RedisServer:
    """A redis-server in a directory, which can be killed, paused, emptied and started again."""

    def __init__(self, directory: Path, *options: str, sentinel: str | None = None) -> None:
        """`sentinel` is the configuration of a Sentinel, which is what is started then."""
        self.port = free_port()
        self._directory = directory
        self._options = options
        self._sentinel = sentinel
        self._process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.skip("redis-server is not installed")
        self._directory.mkdir(parents=True, exist_ok=True)
        command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *self._options]
        if self._sentinel is not None:
            configuration = self._directory / "sentinel.conf"
            configuration.write_text(f"port {self.port}\nbind 127.0.0.1\n{self._sentinel}\n")
            command = [binary, str(configuration), "--sentinel"]
        self._process = await asyncio.create_subprocess_exec(
            *command, cwd=self._directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            await until(self._answers)
        except TimeoutError:
            pytest.fail(f"redis-server does not answer; it ended with {self._process.returncode}")

    async def call(self, *command: str | int | bytes) -> object:
        client: Any = redis.asyncio.Redis(
            host="127.0.0.1", port=self.port, password=self._password(), socket_timeout=10, socket_connect_timeout=10
        )
        try:
            answer: object = await client.execute_command(*command)
            return answer
        finally:
            await client.aclose()

    async def kill(self) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
            self._process = None

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    def _password(self) -> str | None:
        options = list(self._options)
        return options[options.index("--requirepass") + 1] if "--requirepass" in options else None

    async def _answers(self) -> bool:
        try:
            await self.call("PING")
        except (redis.exceptions.RedisError, OSError):
            return False
        return True
