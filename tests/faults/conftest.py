"""A server in processes of its own, to be killed one by one."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import asyncpg
import psutil
import pytest

from tests.acceptance.served import served
from tests.support.database import Connection
from tests.support.workers import worker_processes


@dataclass(frozen=True)
class Victim:
    """A running `queen serve` with two workers and an embedded PostgreSQL."""

    url: str
    data_dir: Path
    supervisor: psutil.Process

    def workers(self) -> list[psutil.Process]:
        """The worker processes that are alive."""
        return worker_processes(self.supervisor.pid)

    def postmaster(self) -> psutil.Process:
        return psutil.Process(int(self._postmaster_file()[0]))

    def kill_postgres(self, *, children_too: bool) -> None:
        """End PostgreSQL as a crash would; its children may have to find out for themselves."""
        postmaster = self.postmaster()
        doomed = [postmaster, *(postmaster.children(recursive=True) if children_too else ())]
        for process in doomed:
            # A child may have ended with the postmaster just now.
            if process.is_running():
                os.kill(process.pid, signal.SIGKILL)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection to its PostgreSQL, past the server."""
        lines = self._postmaster_file()
        where = urlencode({"host": lines[4], "port": lines[3]})
        connection = await asyncpg.connect(f"postgresql://postgres@/postgres?{where}")
        try:
            yield connection
        finally:
            await connection.close()

    def _postmaster_file(self) -> list[str]:
        return (self.data_dir / "postgres" / "cluster" / "postmaster.pid").read_text().splitlines()


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    with served(tmp_path) as server:
        data_dir = tmp_path / "data"
        (supervisor,) = (child for child in psutil.Process().children() if _runs(child, str(data_dir)))
        yield Victim(server.url, data_dir, supervisor)


def _runs(process: psutil.Process, argument: str) -> bool:
    try:
        return argument in process.cmdline()
    except psutil.NoSuchProcess:
        return False
