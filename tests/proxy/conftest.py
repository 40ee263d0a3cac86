"""A server, the proxy in front of it, and an OpenID provider."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import argon2
import pytest
from playwright.async_api import Browser, async_playwright

from queen.proxy.app import Proxy
from queen.proxy.passwords import hash_password
from queen.proxy.settings import ProxySettings
from tests.conftest import StartServer
from tests.dashboard.browser import ARGUMENTS, chromium
from tests.http.auth.issuer import SECRET
from tests.proxy.provider import Provider
from tests.support.api import Api
from tests.support.ports import free_port

PASSWORD = "correct horse battery"


@dataclass
class Site:
    """A proxy that runs, and a client of it with its own cookies."""

    url: str
    proxy: Proxy
    server: Api
    client: aiohttp.ClientSession

    async def add_user(self, username: str, role: str, email: str | None = None) -> None:
        await self.proxy.login.users.create(username, hash_password(PASSWORD), role, email)

    async def log_in(self, username: str, password: str = PASSWORD, **more: Any) -> aiohttp.ClientResponse:
        form = {"username": username, "password": password} | more
        return await self.client.post(f"{self.url}/api/login", json=form)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection to the proxy."""
        place = urlsplit(self.url)
        return await asyncio.open_connection(place.hostname, place.port)


StartProxy = Callable[..., Awaitable[Site]]


@pytest.fixture(autouse=True)
def _short_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed logins are not waited for as long."""
    monkeypatch.setattr("queen.proxy.login._BEAT_SECONDS", 0.001)


@pytest.fixture(autouse=True)
def _cheap_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash takes a core for a tenth of a second, which no test but those in test_passwords.py is about."""
    cheap = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    monkeypatch.setattr("queen.proxy.passwords._hasher", cheap)
    monkeypatch.setattr("queen.proxy.passwords._DECOY", cheap.hash("no password at all"))


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    executable = chromium()
    if executable is None:
        pytest.skip("needs Debian's chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield browser
        await browser.close()


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    provider = Provider()
    await provider.start()
    yield provider
    await provider.stop()


@pytest.fixture
async def start_proxy(dsn: str, start_server: StartServer) -> AsyncIterator[StartProxy]:
    async with AsyncExitStack() as stack:

        async def start(port: int = 0, **settings: Any) -> Site:
            server = await start_server(jwt_enabled=True, jwt_secret=SECRET)
            port = port or free_port()
            values: dict[str, Any] = {
                "database_url": dsn,
                "jwt_secret": SECRET,
                "host": "127.0.0.1",
                "port": port,
                "queen_server_url": server.url,
            }
            proxy = Proxy(ProxySettings(**values | settings))
            await proxy.start()
            stack.push_async_callback(proxy.stop)
            client = await stack.enter_async_context(aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)))
            return Site(f"http://127.0.0.1:{port}", proxy, server, client)

        yield start


@pytest.fixture
async def site(start_proxy: StartProxy) -> Site:
    site = await start_proxy()
    await site.add_user("alice", "admin")
    await site.add_user("rita", "read-only")
    return site
