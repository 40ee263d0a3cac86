"""Random histories of consumers and operators on one queue: nothing is lost, comes twice, or is answered 5xx."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings

from queen.broker.maintenance.election import Session
from queen.storage.database import Database
from tests.broker.operated_queue import OperatedQueue
from tests.broker.operations import histories
from tests.broker.test_model import History
from tests.conftest import StartServer
from tests.support.api import Api
from tests.support.database import Connection

SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"


@pytest.fixture
async def servers(start_server: StartServer, topology: str) -> list[Api]:
    if topology == "one worker":
        return [await start_server()]
    return [await start_server(worker_id=id, num_workers=2) for id in range(2)]


@pytest.fixture
async def session(dsn: str) -> AsyncIterator[Session]:
    database = Database(dsn)
    session = await Session.open(database)
    yield session
    await session.close()
    await database.close()


@pytest.mark.timeout(24 * 3600 if SOAK else 600)
@pytest.mark.parametrize("topology", ["one worker", "two workers"])
@settings(
    max_examples=3000 if SOAK else 6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(history=histories)
async def test_consumers_and_operators_in_any_order_keep_every_promise(
    servers: list[Api], connection: Connection, session: Session, history: History
) -> None:
    run = OperatedQueue(servers, connection, session)
    await run.begin()
    for operation in history:
        await run.step(operation)
    await run.check()
