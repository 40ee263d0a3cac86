"""PostgreSQL's own tools, as docs/backup.md and docs/high-availability.md use them."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from queen.embedded import EmbeddedPostgres
from queen.embedded.account import account_for
from queen.embedded.configuration import find_binaries
from queen.server.worker import Worker
from queen.settings import Settings
from tests.support.api import Api

VERSION: Final = 18
BINARIES: Final = find_binaries(VERSION)


async def postgres_tool(*command: str | Path, env: Mapping[str, str] | None = None) -> str:
    """What one of the tools prints; raises with what it said when it fails."""
    path = f"{BINARIES}:{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"PATH": path, "LC_ALL": "C", **(env or {})},
    )
    said = (await process.communicate())[0].decode()
    assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{said}"
    return said


def as_embedded(cluster: Path, data_dir: Path) -> None:
    """Put a copy of a cluster where an embedded PostgreSQL looks for its own."""
    data_dir.mkdir(mode=0o700)
    (data_dir / "lock").touch()
    shutil.move(cluster, data_dir / "cluster")
    account = account_for(data_dir / "cluster")
    for path in (data_dir, *data_dir.rglob("*")):
        account.chown(path)
    (data_dir / "cluster").chmod(0o700)


@asynccontextmanager
async def running(dsn: str, directory: Path, **settings: object) -> AsyncIterator[Api]:
    """A server on this database that keeps its spool in `directory`."""
    (directory / "run").mkdir(parents=True, exist_ok=True)
    values: dict[str, object] = {"num_workers": 1, "host": "127.0.0.1", "stats_cache_ms": 0}
    values |= {"database_urls": (dsn,), "queen_data_dir": directory / "data"} | settings
    worker = Worker(Settings.from_env({}, **values), 0, directory / "run", port=0)
    await worker.start()
    api = Api(f"http://127.0.0.1:{worker.port}", worker)
    try:
        yield api
    finally:
        await api.close()
        await worker.stop()


def cluster_of(postgres: EmbeddedPostgres) -> Path:
    return postgres.data_dir / "cluster"
