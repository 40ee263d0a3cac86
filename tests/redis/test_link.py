"""The link to Redis says at once when it has gone, and finds it again."""

from __future__ import annotations

import asyncio

import pytest

from queen.errors import RedisUnavailable, SettingsError
from queen.redis.link import RedisLink, Script
from queen.settings import Settings
from tests.redis.conftest import OpenLink, StartRedis
from tests.support.ageing import until

ADD = Script("return redis.call('INCRBY', KEYS[1], ARGV[1])")


async def test_a_killed_redis_is_away_until_it_is_started_again(start_redis: StartRedis, open_link: OpenLink) -> None:
    server = await start_redis()
    link = await open_link(server)
    assert await link.run(ADD, ["n"], [2]) == 2
    await server.kill()
    with pytest.raises(RedisUnavailable):
        await link.command("PING")
    for _ in range(100):
        with pytest.raises(RedisUnavailable):
            await link.command("PING")
    assert link.errors >= 1
    await server.start()
    await until(lambda: link.up)
    # It has forgotten the script as well.
    assert await link.run(ADD, ["n"], [3]) == 3


async def test_a_paused_redis_is_away_after_the_timeout(start_redis: StartRedis, open_link: OpenLink) -> None:
    server = await start_redis()
    link = await open_link(server, redis_timeout_ms=300)
    await until(lambda: link.up)
    server.pause()
    with pytest.raises(RedisUnavailable, match=r"no answer within 0\.3 s$"):
        await asyncio.wait_for(link.command("PING"), 100)
    assert not link.up
    server.resume()
    await until(lambda: link.up)


async def test_a_redis_that_is_not_there_does_not_keep_the_server_from_starting(open_link: OpenLink) -> None:
    link = await open_link(redis_addrs="127.0.0.1:1")
    assert not link.up
    with pytest.raises(RedisUnavailable):
        await link.command("PING")


async def test_a_wrong_password_counts_as_away(start_redis: StartRedis, open_link: OpenLink) -> None:
    link = await open_link(await start_redis("--requirepass", "right"), redis_password="wrong")
    assert not link.up


async def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(SettingsError, match="exclude each other"):
        RedisLink(Settings(redis_addrs=("h",), redis_cluster_mode=True, redis_sentinel_master="m"))
    with pytest.raises(SettingsError, match="expected one address"):
        RedisLink(Settings(redis_addrs=("a", "b")))


async def test_a_connection_that_is_closed_while_something_is_written_to_it_counts_as_away(
    start_redis: StartRedis, open_link: OpenLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = await open_link(await start_redis())

    async def write_to_closed(*args: object) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    with monkeypatch.context() as broken:
        broken.setattr(link._client, "execute_command", write_to_closed)
        with pytest.raises(RedisUnavailable):
            await link.command("PING")
        assert not link.up
        await link._ping()
        assert not link.up
    await until(lambda: link.up)
