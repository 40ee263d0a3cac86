"""Where a consumer group begins."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.acceptance.scenario import Client, Message, Scene, Server, payloads, scenario

OLD = [{"old": n} for n in range(5)]
NEW = [{"new": n} for n in range(3)]


@scenario()
async def a_group_in_mode_new_skips_history(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _check_skips_history(scene, queue, scene.queen.queue(queue).group("g").subscription_mode("new"))


@scenario()
async def a_group_in_mode_new_only_skips_history(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _check_skips_history(scene, queue, scene.queen.queue(queue).group("g").subscription_mode("new-only"))


@scenario()
async def a_group_from_now_skips_history(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _check_skips_history(scene, queue, scene.queen.queue(queue).group("g").subscription_from("now"))


@scenario()
async def a_group_in_mode_new_gets_the_first_message_of_an_empty_queue(scene: Scene) -> None:
    async with scene.queue() as queue:
        builder = scene.queen.queue(queue).group("g").subscription_mode("new").batch(10)
        assert await builder.wait(False).pop() == []
        await _push(scene, queue, NEW)
        assert payloads(await builder.wait(False).pop()) == NEW


@scenario()
async def a_waiting_group_in_mode_new_gets_what_is_pushed_meanwhile(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _push(scene, queue, OLD)
        got: list[Any] = []

        async def handle(message: Message) -> None:
            got.append(message["data"])

        async def consume() -> None:
            await scene.queen.queue(queue).group("g").subscription_mode("new").limit(3).consume(handle)

        consuming = asyncio.create_task(consume())
        await asyncio.sleep(1)
        await _push(scene, queue, NEW)
        await consuming
        assert got == NEW, got


@scenario()
async def a_group_in_mode_new_gets_all_of_a_partition_made_later(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _push(scene, queue, OLD)
        builder = scene.queen.queue(queue).group("g").subscription_mode("new").batch(10)
        assert await builder.wait(False).pop() == []
        await scene.queen.queue(queue).partition("later").push([{"data": data} for data in NEW])
        assert payloads(await builder.wait(False).pop()) == NEW


@scenario()
async def a_group_in_mode_all_gets_history(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _push(scene, queue, OLD)
        for mode in ("all", "from_beginning", "anything-else"):
            builder = scene.queen.queue(queue).group(f"g-{mode}").subscription_mode(mode).batch(10)
            assert payloads(await builder.wait(False).pop()) == OLD, mode


@scenario()
async def a_group_that_does_not_say_gets_history(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _push(scene, queue, OLD)
        assert payloads(await scene.queen.queue(queue).group("g").batch(10).wait(False).pop()) == OLD


@scenario()
async def a_group_from_a_timestamp_gets_what_came_after_it(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _push(scene, queue, OLD)
        seen = await scene.queen.queue(queue).group("witness").batch(10).wait(False).pop()
        await _push(scene, queue, NEW)
        builder = scene.queen.queue(queue).group("g").subscription_from(seen[-1]["createdAt"]).batch(10)
        assert payloads(await builder.wait(False).pop()) == NEW


@scenario()
async def a_group_from_long_ago_gets_everything(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _push(scene, queue, OLD)
        builder = scene.queen.queue(queue).group("g").subscription_from("2020-01-01T00:00:00.000Z").batch(10)
        assert payloads(await builder.wait(False).pop()) == OLD


@scenario()
async def queue_mode_ignores_the_subscription(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _push(scene, queue, OLD)
        assert payloads(await scene.queen.queue(queue).subscription_mode("new").batch(10).wait(False).pop()) == OLD


@scenario(server=Server.NEW_BY_DEFAULT)
async def the_server_default_decides_for_groups_that_do_not_say(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _check_skips_history(scene, queue, scene.queen.queue(queue).group("silent"))
        said = scene.queen.queue(queue).group("said").subscription_mode("all").batch(10)
        assert payloads(await said.wait(False).pop()) == OLD + NEW
        assert payloads(await scene.queen.queue(queue).batch(10).wait(False).pop()) == OLD + NEW


@scenario()
async def the_timestamp_of_a_subscription_is_updated(scene: Scene) -> None:
    async with scene.queue() as queue:
        await _push(scene, queue, OLD)
        group = scene.queue_name("group")
        builder = scene.queen.queue(queue).group(group).subscription_mode("new").batch(10)
        assert await builder.wait(False).pop() == []
        answer = await scene.queen.update_consumer_group_timestamp(group, "2020-01-01T00:00:00.000Z")
        assert answer["success"] is True and answer["rowsUpdated"] == 1, answer
        assert answer["consumerGroup"] == group, answer


async def _check_skips_history(scene: Scene, queue: str, builder: Client) -> None:
    await _push(scene, queue, OLD)
    assert await builder.batch(10).wait(False).pop() == []
    await _push(scene, queue, NEW)
    # A later pop of the group need not say the mode again.
    group = builder._group
    assert payloads(await scene.queen.queue(queue).group(group).batch(10).wait(False).pop()) == NEW


async def _push(scene: Scene, queue: str, data: list[dict[str, int]]) -> None:
    await scene.queen.queue(queue).push([{"data": each} for each in data])
