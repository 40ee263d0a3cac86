"""A `queen serve` for all tests of Celery, which are in one process; each test has a namespace of its own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import pytest

from queen.embedded import EmbeddedPostgres
from tests.celery.queues import Namespace
from tests.support.databases import create_database
from tests.support.host import Host, host


@pytest.fixture(scope="session")
def celery_host(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A server with one worker."""
    dsn = postgres.dsn(asyncio.run(create_database(postgres)))
    with host(dsn, tmp_path_factory.mktemp("celery")) as served:
        served.workers = 1
        served.start()
        asyncio.run(served.ready())
        yield served


@pytest.fixture
def namespace(celery_host: Host) -> Iterator[Namespace]:
    """A namespace of the test's own."""
    with Namespace(celery_host.port, f"test-{uuid.uuid4().hex[:12]}") as one:
        yield one
