"""Transactions: pushes and acknowledgements that happen together or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.acceptance.scenario import Message, Scene, payloads, scenario


@scenario()
async def a_message_moves_from_queue_to_queue(scene: Scene) -> None:
    async with scene.queue("a") as source, scene.queue("b") as target:
        message = await _one(scene, source, {"value": 1})
        answer = await scene.queen.transaction().queue(target).push([{"data": {"value": 2}}]).ack(message).commit()
        assert answer["success"] is True and answer["transactionId"], answer
        assert [(result["type"], result["success"]) for result in answer["results"]] == [("push", True), ("ack", True)]
        assert answer["results"][0]["messageId"] and answer["results"][0]["queueName"] == target, answer
        assert await scene.queen.queue(source).wait(False).pop() == []
        assert payloads(await scene.queen.queue(target).wait(False).pop()) == [{"value": 2}]


@scenario()
async def several_pushes_are_committed_together(scene: Scene) -> None:
    async with scene.queue("a") as first, scene.queue("b") as second, scene.queue("c") as third:
        transaction = scene.queen.transaction()
        for queue in (first, second, third):
            transaction = transaction.queue(queue).push([{"data": {"to": queue}}])
        assert (await transaction.commit())["success"] is True
        for queue in (first, second, third):
            assert payloads(await scene.queen.queue(queue).wait(False).pop()) == [{"to": queue}]


@scenario()
async def several_acknowledgements_are_committed_together(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(4)])
        messages = await scene.queen.queue(queue).batch(3).wait(False).pop()
        transaction = scene.queen.transaction()
        for message in messages:
            transaction = transaction.ack(message)
        assert (await transaction.commit())["success"] is True
        assert payloads(await scene.queen.queue(queue).batch(10).wait(False).pop()) == [{"n": 3}]


@scenario()
async def a_list_of_messages_is_acknowledged_at_once(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(10)])
        messages = await scene.queen.queue(queue).batch(10).wait(False).pop()
        answer = await scene.queen.transaction().ack(messages).commit()
        assert len(answer["results"]) == 10, answer
        assert await scene.queen.queue(queue).wait(False).pop() == []


@scenario()
async def a_failed_acknowledgement_makes_a_dead_letter(scene: Scene) -> None:
    async with scene.queue() as queue:
        message = await _one(scene, queue, {"value": 1})
        answer = await scene.queen.transaction().ack(message, "failed").commit()
        assert answer["success"] is True and answer["results"][0]["dlq"] is True, answer
        assert await scene.queen.queue(queue).wait(False).pop() == []
        assert payloads((await scene.queen.queue(queue).dlq().get())["messages"]) == [{"value": 1}]


@scenario()
async def transactions_are_chained(scene: Scene) -> None:
    async with scene.queue("a") as first, scene.queue("b") as second, scene.queue("c") as third:
        message = await _one(scene, first, {"step": 1})
        for source_step, target in ((1, second), (2, third)):
            assert message["data"] == {"step": source_step}, message
            pushing = scene.queen.transaction().ack(message).queue(target).push([{"data": {"step": source_step + 1}}])
            await pushing.commit()
            [message] = await scene.queen.queue(target).wait(False).pop()
        assert message["data"] == {"step": 3}, message
        await scene.queen.transaction().ack(message).commit()
        for queue in (first, second, third):
            assert await scene.queen.queue(queue).wait(False).pop() == []


@scenario()
async def five_items_are_pushed_in_order(scene: Scene) -> None:
    async with scene.queue() as queue:
        answer = await scene.queen.transaction().queue(queue).push([{"data": {"n": n}} for n in range(5)]).commit()
        assert len(answer["results"]) == 5, answer
        popped = await scene.queen.queue(queue).batch(10).wait(False).pop()
        assert payloads(popped) == [{"n": n} for n in range(5)], popped


@scenario()
async def partitions_of_a_queue_take_part(scene: Scene) -> None:
    async with scene.queue() as queue:
        transaction = scene.queen.transaction()
        for partition in ("a", "b"):
            transaction = transaction.queue(queue).partition(partition).push([{"data": {"in": partition}}])
        await transaction.commit()
        for partition in ("a", "b"):
            popped = await scene.queen.queue(queue).partition(partition).wait(False).pop()
            assert payloads(popped) == [{"in": partition}], popped


@scenario()
async def a_handler_commits_what_it_consumed(scene: Scene) -> None:
    async with scene.queue("a") as source, scene.queue("b") as target:
        await scene.queen.queue(source).push([{"data": {"n": n}} for n in range(5)])

        async def handle(message: Message) -> None:
            doubled = {"data": {"n": message["data"]["n"] * 2}}
            await scene.queen.transaction().queue(target).push([doubled]).ack(message).commit()

        await scene.queen.queue(source).batch(1).auto_ack(False).limit(5).consume(handle)
        assert await scene.queen.queue(source).wait(False).pop() == []
        popped = await scene.queen.queue(target).batch(10).wait(False).pop()
        assert payloads(popped) == [{"n": n * 2} for n in range(5)], popped


@scenario()
async def an_empty_transaction_is_refused_by_the_client(scene: Scene) -> None:
    error = await _refusal(scene.queen.transaction())
    assert "no operations" in error, error


@scenario()
async def a_large_payload_takes_part(scene: Scene) -> None:
    async with scene.queue("a") as source, scene.queue("b") as target:
        message = await _one(scene, source, {"value": 1})
        large = {"rows": [{"n": n, "text": "x" * 100} for n in range(5000)]}
        await scene.queen.transaction().ack(message).queue(target).push([{"data": large}]).commit()
        assert payloads(await scene.queen.queue(target).wait(False).pop()) == [large]


@scenario()
async def several_queues_are_read_and_written(scene: Scene) -> None:
    async with scene.queue("a") as first, scene.queue("b") as second, scene.queue("c") as target:
        messages = [await _one(scene, first, {"from": "a"}), await _one(scene, second, {"from": "b"})]
        transaction = scene.queen.transaction().ack(messages)
        await (
            transaction.queue(target)
            .push([{"data": {"joined": True}}])
            .queue(target)
            .push([{"data": {"joined": "twice"}}])
            .commit()
        )
        for queue in (first, second):
            assert await scene.queen.queue(queue).wait(False).pop() == []
        popped = await scene.queen.queue(target).batch(10).wait(False).pop()
        assert payloads(popped) == [{"joined": True}, {"joined": "twice"}], popped


@scenario()
async def a_group_acknowledges_without_touching_another(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {"n": 1}}])
        [message] = await scene.queen.queue(queue).group("one").wait(False).pop()
        await scene.queen.transaction().ack(message, "completed", {"consumer_group": "one"}).commit()
        assert await scene.queen.queue(queue).group("one").wait(False).pop() == []
        assert payloads(await scene.queen.queue(queue).group("two").wait(False).pop()) == [{"n": 1}]


@scenario()
async def a_failing_operation_undoes_the_whole(scene: Scene) -> None:
    async with scene.queue("a") as source, scene.queue("b") as target:
        message = await _one(scene, source, {"value": 1})
        unknown = {**message, "transactionId": "nobody"}
        transaction = scene.queen.transaction().queue(target).push([{"data": {}}]).ack(message).ack(unknown)
        error = await _refusal(transaction)
        assert error.startswith("ACK operation failed: Message not found"), error
        assert await scene.queen.queue(target).wait(False).pop() == []
        assert (await scene.queen.ack(message, True))["success"] is True


@scenario()
async def an_encrypted_queue_takes_part(scene: Scene) -> None:
    async with scene.queue(encryption_enabled=True) as queue:
        await scene.queen.transaction().queue(queue).push([{"data": {"secret": 1}}, {"data": None}]).commit()
        assert payloads(await scene.queen.queue(queue).batch(2).wait(False).pop()) == [{"secret": 1}, None]


@scenario()
async def pushing_creates_the_queue(scene: Scene) -> None:
    await scene.queen.transaction().queue(scene.queue_name()).push([{"data": {"n": 1}}]).commit()
    assert payloads(await scene.queen.queue(scene.queue_name()).wait(False).pop()) == [{"n": 1}]


@scenario()
async def a_waiting_pop_gets_what_a_transaction_pushed(scene: Scene) -> None:
    async with scene.queue() as queue:
        got: list[Any] = []

        async def handle(message: Message) -> None:
            got.append(message["data"])

        async def consume() -> None:
            await scene.queen.queue(queue).limit(1).consume(handle)

        consuming = asyncio.create_task(consume())
        await asyncio.sleep(1)
        await scene.queen.transaction().queue(queue).push([{"data": {"n": 1}}]).commit()
        await consuming
        assert got == [{"n": 1}], got


async def _one(scene: Scene, queue: str, data: dict[str, Any]) -> Message:
    """Push a message and pop it."""
    await scene.queen.queue(queue).push([{"data": data}])
    popped: list[Message] = await scene.queen.queue(queue).wait(False).pop()
    assert payloads(popped) == [data], popped
    return popped[0]


async def _refusal(transaction: Any) -> str:
    """The text of the error that a commit raises."""
    try:
        answer = await transaction.commit()
    except Exception as error:
        return str(error)
    raise AssertionError(f"committed: {answer}")
