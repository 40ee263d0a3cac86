"""One client, several servers: balancing and failover."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from queen import Message, Queen, QueenConnectionError
from queen.client.config import Strategy
from queen.client.http import Balancer, fnv1a
from tests.client.conftest import MakeClient, proxy_to, url_of
from tests.conftest import StartServer
from tests.support.api import Api
from tests.support.clock import Clock

URLS = ("http://a", "http://b", "http://c")


def balancer(strategy: Strategy, clock: Clock[float] | None = None) -> Balancer:
    return Balancer(URLS, strategy, 128, 5.0, clock=clock or Clock(0.0))


def test_hash_is_the_one_all_clients_agree_on() -> None:
    assert fnv1a("") == 0x811C9DC5
    assert fnv1a("a") == 0xE40C292C
    assert fnv1a("foobar") == 0xBF9CF968


def test_affinity_spreads_keys_and_keeps_each_where_it_is() -> None:
    chosen = balancer(Strategy.AFFINITY)
    firsts = {f"queue-{n}:*:group": chosen.order(f"queue-{n}:*:group")[0] for n in range(300)}
    assert min(Counter(firsts.values()).values()) > 50
    again = balancer(Strategy.AFFINITY)
    assert all(again.order(key)[0] == url for key, url in firsts.items())


def test_round_robin_takes_turns_and_session_does_not() -> None:
    turns = balancer(Strategy.ROUND_ROBIN)
    assert [turns.order()[0] for _ in range(4)] == ["http://a", "http://b", "http://c", "http://a"]
    session = balancer(Strategy.SESSION)
    assert len({session.order()[0] for _ in range(10)}) == 1
    assert len({session.order("key")[0] for _ in range(10)}) == 1


def test_server_that_failed_comes_last_until_it_has_rested() -> None:
    clock = Clock(100.0)
    chosen = balancer(Strategy.AFFINITY, clock)
    first, *others = chosen.order("key")
    chosen.mark_failed(first)
    assert chosen.order("key") == (*others, first)
    clock.now += 5.1
    assert chosen.order("key") == (first, *others)
    chosen.mark_failed(first)
    chosen.mark_healthy(first)
    assert chosen.order("key") == (first, *others)


@pytest.fixture
async def pair(start_server: StartServer) -> tuple[Api, Api]:
    return await start_server(worker_id=0, num_workers=2), await start_server(worker_id=1, num_workers=2)


async def test_two_servers_behind_one_client_share_their_queues(pair: tuple[Api, Api], make_client: MakeClient) -> None:
    queen = make_client(pair[0].url, pair[1].url, load_balancing_strategy="round-robin")
    got: list[Any] = []

    async def handle(message: Message) -> None:
        got.append(message["data"])

    for n in range(20):
        await queen.queue("q").push({"data": n})
    await queen.queue("q").limit(20).consume(handle)
    assert got == list(range(20))


async def test_consumer_moves_to_the_other_server_when_its_own_dies(
    pair: tuple[Api, Api], make_client: MakeClient
) -> None:
    async with proxy_to(pair[0]) as wire:
        urls = (url_of(wire), pair[1].url)
        queen = make_client(*urls)
        balancer = queen.engine.http.balancer
        # The queue's name is chosen so that the consumer begins at the server that will die.
        queue = next(f"q{n}" for n in range(100) if balancer.order(f"q{n}:*:__QUEUE_MODE__")[0] == urls[0])
        await queen.queue(queue).push([{"data": n} for n in range(10)])
        got: list[Any] = []

        async def handle(message: Message) -> None:
            got.append(message["data"])
            if message["data"] == 4:
                wire.refusing = True
                wire.cut()

        await queen.queue(queue).limit(10).consume(handle)
        assert got == list(range(10))
        assert balancer.order(f"{queue}:*:__QUEUE_MODE__")[0] == urls[1]


async def test_without_failover_one_dead_server_is_an_error(api: Api, make_client: MakeClient) -> None:
    dead = "http://127.0.0.1:1"
    options: dict[str, Any] = {"load_balancing_strategy": "session", "enable_failover": False, "retry_attempts": 1}
    queen = make_client(dead, dead + "/", api.url, **options)
    key = next(f"k{n}" for n in range(100) if queen.engine.http.balancer.order(f"k{n}")[0] == dead)
    with pytest.raises(QueenConnectionError, match="connection failed") as caught:
        await queen.request("GET", "/health", affinity_key=key)
    assert caught.value.url == f"{dead}/health"
    assert (caught.value.method, caught.value.status) == ("GET", None)


async def test_token_and_headers_go_with_every_request() -> None:
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, Queen(url, bearer_token="secret", headers={"X-Tenant": "seven"}) as queen:
        assert await queen.queue("a queue/with a slash").partition("p q").wait(False).pop() == []
    assert heads[0].startswith(
        b"GET /api/v1/pop/queue/a%20queue%2Fwith%20a%20slash/partition/p%20q?batch=1&wait=false&"
    )
    assert b"Authorization: Bearer secret\r\n" in heads[0] and b"X-Tenant: seven\r\n" in heads[0]


async def test_names_that_need_quoting_reach_their_queue(api: Api, make_client: MakeClient) -> None:
    queen = make_client(api.url)
    for name in ("a queue", "a/b", "50%", "ü?&#"):
        await queen.queue(name).partition(name).push({"data": name})
        [message] = await queen.queue(name).partition(name).group(name).wait(False).pop()
        assert message["data"] == name
        assert (await queen.admin.get_queue(name))["name"] == name
        assert (await queen.queue(name).delete())["existed"] is True
