"""Servers on two shards: databases of one PostgreSQL, which a test may stand a proxy before."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from queen.embedded import EmbeddedPostgres
from tests.conftest import StartServer
from tests.support.api import Api
from tests.support.databases import fresh_database
from tests.support.proxy import Proxy, proxied
from tests.support.topic_api import TopicApi


@pytest.fixture
async def second_dsn(postgres: EmbeddedPostgres) -> AsyncIterator[str]:
    """Another fresh database, for the second shard."""
    async with fresh_database(postgres) as dsn:
        yield dsn


@pytest.fixture
def dsns(dsn: str, second_dsn: str) -> tuple[str, str]:
    return dsn, second_dsn


@pytest.fixture
async def second_proxy(second_dsn: str) -> AsyncIterator[Proxy]:
    """Stands between a server and the second shard."""
    async with proxied(second_dsn) as proxy:
        yield proxy


@pytest.fixture
async def api(start_server: StartServer, dsns: tuple[str, str]) -> Api:
    """A server on two shards."""
    return await start_server(database_urls=dsns)


@pytest.fixture
def topics(api: Api) -> TopicApi:
    return TopicApi(api)
