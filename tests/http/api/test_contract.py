"""schemathesis reads the document of a running server and tries what it promises: nothing may answer 5xx."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.support.api import Api

TESTS = Path(__file__).parents[2]

# What the campaigns need something to be done with: ids of messages are not guessed.
PREPARED = "orders"

Campaign = Callable[..., Awaitable[None]]


@pytest.fixture
async def campaign(start_server: StartServer, tmp_path: Path) -> Campaign:
    """Runs schemathesis with these arguments against a server that holds a few messages; fails when it complains."""
    api = await start_server(default_timeout=20)
    await _prepare(api)

    async def run(*arguments: str) -> None:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("schemathesis")),
            f"--config-file={TESTS / 'support' / 'schemathesis.toml'}",
            "--no-color",
            "run",
            f"{api.url}/openapi.json",
            "--continue-on-failure",
            "--request-timeout=20",
            "--warnings=off",
            *arguments,
            # It leaves files of its own where it runs.
            cwd=tmp_path,
            env=os.environ | {"SCHEMATHESIS_HOOKS": "tests.support.contract_hooks", "PYTHONPATH": str(TESTS.parent)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, output.decode()
        assert b"Tested: " in output, output.decode()

    return run


async def _prepare(api: Api) -> None:
    await api.push(PREPARED, 1, 2, 3, ids=["order-1", "order-2", "order-3"])
    (message,) = await api.pop(PREPARED, consumerGroup="workers")
    await api.ack([message], "dlq", group="workers")


@pytest.mark.timeout(240)
async def test_the_server_keeps_what_its_document_promises(campaign: Campaign) -> None:
    await campaign("--phases=examples,fuzzing", "--max-examples=2", "--no-shrink", "--seed=1")


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_the_server_keeps_what_its_document_promises_through_a_long_campaign(campaign: Campaign) -> None:
    await campaign("--phases=examples,coverage,fuzzing,stateful", "--max-examples=400", "--max-time=1200")
