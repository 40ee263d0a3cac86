"""Clients of a real server, and a proxy between them that can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from queen import Queen
from tests.support.api import Api
from tests.support.proxy import TcpProxy

MakeClient = Callable[..., Queen]


@pytest.fixture
async def make_client() -> AsyncIterator[MakeClient]:
    """Makes clients that try again quickly; closed with the test."""
    async with AsyncExitStack() as stack:

        def make(*urls: str, **options: Any) -> Queen:
            defaults: dict[str, Any] = {"retry_delay_millis": 20, "handle_signals": False}
            queen = Queen(list(urls), **(defaults | options))
            stack.push_async_callback(queen.close)
            return queen

        yield make


@pytest.fixture
def queen(api: Api, make_client: MakeClient) -> Queen:
    """A client of the test's server."""
    return make_client(api.url)


@pytest.fixture
async def wire(api: Api) -> AsyncIterator[TcpProxy]:
    """A way to the test's server that can be cut."""
    async with proxy_to(api) as proxy:
        yield proxy


@asynccontextmanager
async def proxy_to(api: Api) -> AsyncIterator[TcpProxy]:
    """A way to a server that can be cut; clients reach it at `url_of(proxy)`."""
    where = urlsplit(api.url)
    proxy = TcpProxy(lambda: asyncio.open_connection(where.hostname, where.port))
    await proxy.start()
    yield proxy
    await proxy.stop()


def url_of(proxy: TcpProxy) -> str:
    return f"http://127.0.0.1:{proxy.port}"
