"""The client's own buffer: messages go together, by count or by time."""

from __future__ import annotations

from tests.acceptance.scenario import Scene, payloads, scenario


@scenario()
async def buffered_messages_are_sent_when_their_time_is_up(scene: Scene) -> None:
    async with scene.queue() as queue:
        for n in range(3):
            answer = (
                await scene.queen.queue(queue)
                .buffer({"message_count": 100, "time_millis": 3000})
                .push([{"data": {"n": n}}])
            )
            assert answer == {"buffered": True, "count": 1}, answer
        assert await scene.queen.queue(queue).wait(False).pop() == []
        popped = await scene.queen.queue(queue).batch(10).timeout_millis(20_000).pop()
        assert payloads(popped) == [{"n": n} for n in range(3)], popped


@scenario()
async def a_full_buffer_is_sent_at_once(scene: Scene) -> None:
    async with scene.queue() as queue:
        buffered = scene.queen.queue(queue).buffer({"message_count": 10, "time_millis": 60_000})
        await buffered.push([{"data": {"n": n}} for n in range(10)])
        popped = await scene.queen.queue(queue).batch(10).timeout_millis(5000).pop()
        assert payloads(popped) == [{"n": n} for n in range(10)], popped


@scenario()
async def a_flushed_buffer_is_sent_in_order(scene: Scene) -> None:
    async with scene.queue() as queue:
        for n in range(250):
            await (
                scene.queen.queue(queue)
                .buffer({"message_count": 1000, "time_millis": 60_000})
                .push([{"data": {"n": n}}])
            )
        assert scene.queen.get_buffer_stats()["totalBufferedMessages"] == 250
        await scene.queen.queue(queue).flush_buffer()
        assert scene.queen.get_buffer_stats()["totalBufferedMessages"] == 0
        popped = await scene.queen.queue(queue).batch(250).wait(False).pop()
        assert payloads(popped) == [{"n": n} for n in range(250)]


@scenario()
async def closing_the_client_sends_what_it_buffered(scene: Scene) -> None:
    async with scene.queue() as queue:
        async with scene.new_client(scene.url) as client:
            await client.queue(queue).buffer({"message_count": 100, "time_millis": 60_000}).push([{"data": {"n": 1}}])
        assert payloads(await scene.queen.queue(queue).wait(False).pop()) == [{"n": 1}]
