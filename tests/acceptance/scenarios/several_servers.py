"""The client's load balancing and failover."""

from __future__ import annotations

from tests.acceptance.scenario import Scene, payloads, scenario, statuses

DEAD = "http://127.0.0.1:1"


@scenario()
async def a_dead_server_is_passed_over(scene: Scene) -> None:
    for strategy in ("affinity", "round-robin", "session"):
        async with scene.new_client(urls=[DEAD, scene.url], load_balancing_strategy=strategy) as client:
            queue = scene.queue_name(strategy)
            for n in range(5):
                assert statuses(await client.queue(queue).push([{"data": {"n": n}}])) == ["queued"]
            messages = await client.queue(queue).batch(10).wait(False).pop()
            assert payloads(messages) == [{"n": n} for n in range(5)], messages
            assert (await client.ack(messages, True))["success"] is True


@scenario()
async def two_addresses_serve_the_same_queues(scene: Scene) -> None:
    urls = [scene.url, scene.url.replace("127.0.0.1", "localhost")]
    async with scene.new_client(urls=urls, load_balancing_strategy="round-robin") as client:
        queue = scene.queue_name()
        for n in range(20):
            await client.queue(queue).push([{"data": {"n": n}}])
            messages = await client.queue(queue).wait(False).pop()
            assert payloads(messages) == [{"n": n}], messages
            assert (await client.ack(messages[0], True))["success"] is True
