"""Clients that know nothing of shards, in front of a server that has two."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from queen.embedded import EmbeddedPostgres
from tests.acceptance.client_environment import clean_environ, client_python
from tests.acceptance.scenario import Implementation, Scenario, Server
from tests.acceptance.scenarios import all_scenarios
from tests.acceptance.served import Served, served

_ROOT = Path(__file__).parents[3]
_MODULES = ("administration", "dead_letters", "popping", "queues", "subscriptions")
_LONGEST_SECONDS = 30.0


@pytest.fixture(scope="module")
def server(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`queen serve` on two databases that it has never seen."""
    names = ("clients_0", "clients_1")
    asyncio.run(make_databases(postgres, names))
    with served(
        tmp_path_factory.mktemp("server"),
        DATABASE_URLS=",".join(postgres.dsn(name) for name in names),
        QUEEN_ENCRYPTION_KEY="0123456789abcdef" * 4,
    ) as server:
        yield server


@pytest.mark.timeout(400)
@pytest.mark.parametrize("client", [Implementation.PUBLISHED, pytest.param(Implementation.OWN, marks=pytest.mark.soak)])
def test_a_client_notices_nothing_of_shards(client: Implementation, server: Served) -> None:
    python = str(client_python(_ROOT / ".venv-client")) if client is Implementation.PUBLISHED else sys.executable
    chosen = [one.id for one in all_scenarios() if _is_chosen(one)]
    assert len(chosen) > 40
    command = [python, "-m", "tests.acceptance.run", client.value, json.dumps({Server.MAIN.value: server.url}), *chosen]
    done = subprocess.run(command, cwd=_ROOT, env=clean_environ(), stdout=subprocess.PIPE, text=True, check=True)
    results: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert {result["id"] for result in results} == set(chosen)
    failures = {result["id"]: result["error"] for result in results if result["error"]}
    assert not failures, "\n\n".join(f"{one}: {error}" for one, error in failures.items())
    assert not server.errors()


def _is_chosen(one: Scenario) -> bool:
    return one.module in _MODULES and one.server is Server.MAIN and one.seconds <= _LONGEST_SECONDS and not one.alone


async def make_databases(postgres: EmbeddedPostgres, names: tuple[str, ...]) -> None:
    admin = await asyncpg.connect(postgres.dsn())
    for name in names:
        await admin.execute(f"CREATE DATABASE {name}")
    await admin.close()
