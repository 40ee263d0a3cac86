"""What is promised of copies, ready queues, keys and counters, of those in memory and of those in Redis alike."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from queen.redis.interfaces import Counters, FillTurnState, Keys, ReadyQueue
from queen.redis.link import RedisLink
from queen.redis.memory import MemoryCounters, MemoryKeys, MemoryReadyQueue
from queen.redis.stores import Copied, RedisCopies, RedisCounters, RedisKeys, RedisReadyQueue
from queen.wire.topics.items import ReadyItem, to_micros
from tests.support.ageing import until

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
TOPIC = 7


@pytest.fixture
def ready(link: RedisLink | None) -> ReadyQueue:
    return MemoryReadyQueue() if link is None else RedisReadyQueue(link)


@pytest.fixture
def keys(link: RedisLink | None) -> Keys:
    return MemoryKeys() if link is None else RedisKeys(link)


@pytest.fixture
def counters(link: RedisLink | None) -> Counters:
    return MemoryCounters() if link is None else RedisCounters(link)


@pytest.fixture
def copies(link: RedisLink | None) -> RedisCopies:
    if link is None:
        pytest.skip("copies are for other hosts: there are none in memory")
    return RedisCopies(link, 0)


def ready_item(id: int, priority: int = 0, after: timedelta = timedelta()) -> ReadyItem:
    return ReadyItem(id, TOPIC, priority, to_micros(NOW + after), None, True, b',"data":"x"')


def numbers(items: list[ReadyItem]) -> list[int]:
    return [item.id for item in items]


async def offer(ready: ReadyQueue, *items: ReadyItem) -> None:
    turn = await ready.begin(TOPIC, "token", 0)
    assert turn.state is FillTurnState.YOURS
    await ready.end(TOPIC, "token", 0, 0, items)


async def test_a_ready_queue_gives_the_most_urgent_first_whenever_they_came(ready: ReadyQueue) -> None:
    await ready.open(TOPIC, "token")
    hour = timedelta(hours=1)
    await offer(ready, ready_item(1, 5), ready_item(2, -3, hour), ready_item(3, 2**31 - 1))
    await offer(ready, ready_item(9, -3), ready_item(4, -(2**31), 99999 * hour), ready_item(8, -3, -9999999 * hour))
    turn = await ready.begin(TOPIC, "token", 10)
    assert (turn.state, turn.depth, numbers(turn.items)) == (FillTurnState.YOURS, 6, [4, 8, 9, 2, 1, 3])
    assert turn.items[1] == ready_item(8, -3, -9999999 * hour)


async def test_what_is_taken_has_gone_and_what_is_not_stays(ready: ReadyQueue) -> None:
    await ready.open(TOPIC, "token")
    await offer(ready, *map(ready_item, range(1, 6)))
    turn = await ready.begin(TOPIC, "token", 3)
    assert (numbers(turn.items), turn.depth) == ([1, 2, 3], 5)
    assert await ready.end(TOPIC, "token", 0, 2, [ready_item(9)]) == 4
    turn = await ready.begin(TOPIC, "token", 10)
    assert numbers(turn.items) == [3, 4, 5, 9]


async def test_a_turn_has_the_number_that_the_last_one_said(ready: ReadyQueue) -> None:
    await ready.open(TOPIC, "token")
    assert (await ready.begin(TOPIC, "token", 1)).number == 0
    await ready.end(TOPIC, "token", 7, 0, [ready_item(1)])
    turn = await ready.begin(TOPIC, "token", 5)
    assert (turn.number, numbers(turn.items)) == (7, [1])


async def test_one_at_a_time_has_the_turn(ready: ReadyQueue) -> None:
    await ready.open(TOPIC, "token")
    assert (await ready.begin(TOPIC, "token", 1)).state is FillTurnState.YOURS
    assert (await ready.begin(TOPIC, "token", 1)).state is FillTurnState.BUSY
    await ready.end(TOPIC, "token", 0, 0, [])
    assert (await ready.begin(TOPIC, "token", 1)).state is FillTurnState.YOURS


async def test_a_queue_whose_turn_never_ended_is_lost_until_it_is_opened_again(ready: ReadyQueue) -> None:
    await ready.open(TOPIC, "token")
    await offer(ready, ready_item(1))
    assert (await ready.begin(TOPIC, "token", 1)).state is FillTurnState.YOURS

    async def over() -> bool:
        return (await ready.begin(TOPIC, "token", 1)).state is not FillTurnState.BUSY

    await until(over, 60)
    assert (await ready.begin(TOPIC, "token", 1)).state is FillTurnState.LOST
    await ready.open(TOPIC, "another")
    turn = await ready.begin(TOPIC, "another", 1)
    assert (turn.state, turn.items) == (FillTurnState.YOURS, [])


async def test_with_another_token_the_queue_is_lost(ready: ReadyQueue) -> None:
    assert (await ready.begin(TOPIC, "token", 1)).state is FillTurnState.LOST
    await ready.open(TOPIC, "token")
    await offer(ready, ready_item(1))
    await ready.open(TOPIC, "later")
    assert (await ready.begin(TOPIC, "token", 1)).state is FillTurnState.LOST
    await ready.end(TOPIC, "token", 0, 0, [ready_item(2)])
    assert (await ready.begin(TOPIC, "later", 1)).depth == 0


async def test_topics_have_queues_of_their_own(ready: ReadyQueue) -> None:
    await ready.open(TOPIC, "token")
    await ready.open(TOPIC + 1, "token")
    await offer(ready, ready_item(1))
    assert [(await ready.begin(topic, "token", 0)).depth for topic in (TOPIC, TOPIC + 1)] == [1, 0]


async def test_keys_are_known_to_their_namespace_once_learnt(keys: Keys) -> None:
    await keys.learn("ns", ["a", "b{x}", "ä" * 255], 600)
    assert await keys.known("ns", ["a", "b{x}", "c", "ä" * 255]) == {"a", "b{x}", "ä" * 255}
    assert await keys.known("n", ["sa", "a"]) == set() == await keys.known("ns", [])
    many = [f"key {number}" for number in range(2500)]
    await keys.learn("ns", many, 600)
    await keys.learn("ns", [], 600)
    assert await keys.known("ns", many) == set(many)


async def test_a_key_is_forgotten_after_its_time(keys: Keys) -> None:
    await keys.learn("ns", ["soon", "later"], 600)
    await keys.learn("ns", ["soon"], 0.001)

    async def forgotten() -> bool:
        return await keys.known("ns", ["soon", "later"]) == {"later"}

    await until(forgotten)


async def test_of_too_many_keys_in_memory_the_oldest_are_forgotten() -> None:
    keys = MemoryKeys(most=3)
    await keys.learn("ns", ["a", "b", "c"], 600)
    await keys.learn("ns", ["a", "d"], 600)
    assert await keys.known("ns", ["a", "b", "c", "d"]) == {"c", "a", "d"}


async def test_a_counter_admits_up_to_its_limit(counters: Counters) -> None:
    assert [(await counters.add("a", 4, 10)).left for _ in range(2)] == [6, 2]
    refused = await counters.add("a", 3, 10)
    assert (refused.admitted, refused.left) == (False, 2)
    assert 1 <= refused.wait <= 60
    last = await counters.add("a", 2, 10)
    assert (last.admitted, last.left) == (True, 0)
    assert (await counters.add("b", 10, 10)).admitted
    assert not (await counters.add("c", 11, 10)).admitted


async def test_concurrent_counts_do_not_exceed_the_limit(counters: Counters) -> None:
    counted = await asyncio.gather(*(counters.add("a", 1, 20) for _ in range(50)))
    assert sum(one.admitted for one in counted) == 20


async def test_copies_are_read_in_order_from_a_byte_on_until_they_are_trimmed(copies: RedisCopies) -> None:
    records = [Copied(24 + 10 * n, 34 + 10 * n, bytes([n, 0xFF])) for n in range(4)]
    await copies.add("file", records[2:])
    await copies.add("file", records[:2])
    await copies.add("file", records[:1])
    await copies.add("other", records[:1])
    assert await copies.files() == {"file", "other"}
    assert await copies.read("file", 24, 10) == records
    assert await copies.read("file", 34, 2) == records[1:3]
    await copies.trim("file", 50)
    assert await copies.read("file", 0, 10) == records[2:]
    await copies.trim("file", 64)
    assert await copies.files() == {"other"}
    assert await copies.read("file", 0, 10) == []
    await copies.trim("nobody's", 10)
    assert await copies.read("other", 0, 10) == records[:1]
