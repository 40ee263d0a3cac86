"""Redis for the tests of what is kept at hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from queen.redis.link import RedisLink
from queen.settings import Settings
from tests.redis.redis_server import RedisServer
from tests.support.ageing import until
from tests.support.ports import free_port

StartRedis = Callable[..., Awaitable[RedisServer]]
OpenLink = Callable[..., Awaitable[RedisLink]]


@pytest.fixture
async def start_redis(tmp_path: Path) -> AsyncIterator[StartRedis]:
    """Starts redis-servers that end with the test."""
    servers: list[RedisServer] = []

    async def start(*options: str, sentinel: str | None = None) -> RedisServer:
        server = RedisServer(tmp_path / f"redis{len(servers)}", *options, sentinel=sentinel)
        servers.append(server)
        await server.start()
        return server

    yield start
    for server in servers:
        await server.kill()


@pytest.fixture
async def open_link() -> AsyncIterator[OpenLink]:
    """Opens links that are closed with the test; settings are given by field name."""
    async with AsyncExitStack() as stack:

        async def open_one(*servers: RedisServer, **settings: object) -> RedisLink:
            addresses = ",".join(server.address for server in servers)
            # Patient, as machines that run tests are slow at times.
            values = {"redis_addrs": addresses, "redis_timeout_ms": 10_000} | settings
            link = RedisLink(Settings.from_env({}, **values))
            await link.start()
            stack.push_async_callback(link.stop)
            return link

        yield open_one


@pytest.fixture(params=["memory", "redis", "sentinel", "cluster"])
async def link(request: pytest.FixtureRequest, start_redis: StartRedis, open_link: OpenLink) -> RedisLink | None:
    """Each kind of Redis that can be connected to; None stands for memory."""
    if request.param == "memory":
        return None
    if request.param == "redis":
        return await open_link(await start_redis("--requirepass", "secret"), redis_password="secret")
    if request.param == "sentinel":
        server = await start_redis()
        watch = f"sentinel monitor queen 127.0.0.1 {server.port} 1"
        sentinel = await start_redis(sentinel=watch)
        return await open_link(sentinel, redis_sentinel_master="queen")
    server = await start_redis("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    await server.call("CLUSTER", "ADDSLOTSRANGE", 0, 16383)

    async def formed() -> bool:
        return "cluster_state:ok" in str(await server.call("CLUSTER", "INFO"))

    await until(formed)
    return await open_link(server, redis_cluster_mode=True)
