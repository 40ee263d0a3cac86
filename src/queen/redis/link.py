"""The connection to Redis: one server, one found by Sentinel, or a cluster.

A command that takes too long fails, and from then on all commands fail at once, until Redis answers a ping again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

from queen.concurrency import BackgroundTask
from queen.errors import RedisUnavailable, SettingsError
from queen.setting_kinds import split_host_port
from queen.settings import Settings

log = logging.getLogger(__name__)

_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
_PING_SECONDS: Final = 0.25
_MOST_CONNECTIONS: Final = 64


class _Client(Protocol):
    def execute_command(self, *args: Any) -> Awaitable[Any]: ...

    async def aclose(self) -> None: ...


class Script:
    """A Lua script; its text is sent only to a Redis that does not have it cached."""

    __slots__ = ("digest", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha1(text.encode()).hexdigest()


class RedisLink:
    """Commands to Redis, which raise `RedisUnavailable`."""

    def __init__(self, settings: Settings) -> None:
        try:
            import redis.exceptions
        except ImportError as error:
            raise SettingsError(
                "REDIS_ADDRS is set, but the package redis is not installed: pip install '.[redis]' in a clone"
            ) from error

        self.prefix = settings.redis_prefix
        self._timeout = settings.redis_timeout_ms / 1000
        self._client = _connect(settings)
        # uvloop raises RuntimeError for what is written to a connection that was closed meanwhile.
        self._failures = (redis.exceptions.RedisError, OSError, TimeoutError, RuntimeError)
        self._no_script = redis.exceptions.NoScriptError
        self._background = BackgroundTask()
        self._lost = asyncio.Event()
        self.up = False
        """Whether the last command was answered."""
        self.errors = 0
        """Commands that failed."""

    async def start(self) -> None:
        """Ping Redis once, and from then on while it is unavailable."""
        await self._ping()
        if not self.up:
            self._lost.set()
            log.warning("Redis is unavailable; continuing with PostgreSQL alone until it answers")
        self._background.start(self._reconnect())

    async def stop(self) -> None:
        await self._background.stop()
        self.up = False
        await self._client.aclose()

    async def command(self, *args: Any) -> Any:
        """Run one command. Raises `RedisUnavailable`; whether it was done is then unknown."""
        return await self._ask(lambda: self._client.execute_command(*args))

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script on keys, which in a cluster are all in one slot."""
        try:
            return await self._ask(
                lambda: self._client.execute_command("EVALSHA", script.digest, len(keys), *keys, *args)
            )
        except self._no_script:
            return await self.command("EVAL", script.text, len(keys), *keys, *args)

    async def _ask(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        if not self.up:
            raise RedisUnavailable("Redis is unavailable; reconnecting")
        try:
            async with asyncio.timeout(self._timeout):
                return await ask()
        except self._no_script:
            raise
        except self._failures as error:
            self._mark_down(error)
            raise RedisUnavailable(f"Redis is unavailable: {self._reason(error)}") from error

    def _mark_down(self, error: BaseException) -> None:
        self.errors += 1
        if not self.up:
            return
        self.up = False
        self._lost.set()
        log.warning("Redis is unavailable, continuing with PostgreSQL alone: %s", self._reason(error))

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError) and not str(error):
            return f"no answer within {self._timeout:g} s"
        return str(error) or type(error).__name__

    async def _reconnect(self) -> None:
        while True:
            await self._lost.wait()
            await asyncio.sleep(_PING_SECONDS)
            await self._ping()
            if self.up:
                self._lost.clear()
                log.info("Redis is available")

    async def _ping(self) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._client.execute_command("PING")
        except self._failures as error:
            log.debug("Redis does not answer a ping: %s", self._reason(error))
            return
        self.up = True


def _connect(settings: Settings) -> _Client:
    import redis.asyncio
    from redis.asyncio.cluster import ClusterNode
    from redis.asyncio.retry import Retry
    from redis.asyncio.sentinel import Sentinel
    from redis.backoff import NoBackoff

    timeout = settings.redis_timeout_ms / 1000
    addresses = [
        _address(text, _SENTINEL_PORT if settings.redis_sentinel_master else _PORT) for text in settings.redis_addrs
    ]
    common: dict[str, Any] = {
        "password": settings.redis_password or None,
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
    }
    if settings.redis_cluster_mode and settings.redis_sentinel_master:
        raise SettingsError("REDIS_CLUSTER_MODE and REDIS_SENTINEL_MASTER exclude each other: keep one of them")
    if settings.redis_cluster_mode:
        nodes = [ClusterNode(host, port) for host, port in addresses]
        return redis.asyncio.RedisCluster(startup_nodes=nodes, **common)
    common["max_connections"] = _MOST_CONNECTIONS
    if settings.redis_sentinel_master:
        # The package has no types for it.
        sentinels: Any = Sentinel
        asked = sentinels(addresses, sentinel_kwargs=common | {"password": None}, **common)
        client: _Client = asked.master_for(settings.redis_sentinel_master)
        return client
    if len(addresses) > 1:
        raise SettingsError(
            f"REDIS_ADDRS={','.join(settings.redis_addrs)}: expected one address,"
            " unless REDIS_SENTINEL_MASTER or REDIS_CLUSTER_MODE is set"
        )
    host, port = addresses[0]
    return redis.asyncio.Redis(host=host, port=port, **common)


def _address(text: str, port: int) -> tuple[str, int]:
    host, given = split_host_port(text)
    return host, given if given is not None else port
