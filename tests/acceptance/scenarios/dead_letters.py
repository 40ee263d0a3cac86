"""Messages whose retries are exhausted are kept, with what went wrong."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.acceptance.scenario import Message, Scene, payloads, scenario


@scenario()
async def a_message_that_fails_beyond_its_retries_is_a_dead_letter(scene: Scene) -> None:
    async with scene.queue(retry_limit=1, retry_delay=100) as queue:
        await scene.queen.queue(queue).push([{"transactionId": "poison", "data": {"n": 1}}])
        failed: list[Any] = []
        exhausted = asyncio.Event()

        async def handle(message: Message) -> None:
            raise ValueError("cannot digest this")

        async def fail(message: Message, error: Exception) -> None:
            answer = await scene.queen.ack(message, False, {"error": str(error)})
            failed.append(answer["dlq"])
            if answer["dlq"]:
                exhausted.set()

        consumer = scene.queen.queue(queue).batch(1).timeout_millis(500)
        await consumer.consume(handle, signal=exhausted).on_error(fail)
        assert failed == [False, True], failed
        found = await scene.queen.queue(queue).dlq().get()
        assert found["total"] == 1 and len(found["messages"]) == 1, found
        letter = found["messages"][0]
        assert letter["data"] == {"n": 1} and letter["transactionId"] == "poison", letter
        assert "cannot digest this" in letter["errorMessage"], letter
        assert letter["retryCount"] == 1 and letter["queue"] == queue, letter
        assert await scene.queen.queue(queue).wait(False).pop() == []


@scenario()
async def automatic_negative_acknowledgement_leads_to_a_dead_letter(scene: Scene) -> None:
    async with scene.queue(retry_limit=2, retry_delay=50) as queue:
        await scene.queen.queue(queue).push([{"data": {"n": 1}}])
        calls: list[Any] = []

        async def handle(message: Message) -> None:
            calls.append(message["data"])
            raise ValueError("never")

        await scene.queen.queue(queue).batch(1).idle_millis(1000).timeout_millis(300).consume(handle)
        assert len(calls) == 3, calls
        found = await scene.queen.queue(queue).dlq("__QUEUE_MODE__").get()
        assert payloads(found["messages"]) == [{"n": 1}], found


@scenario()
async def a_failing_batch_is_decided_once(scene: Scene) -> None:
    async with scene.queue(retry_limit=2, retry_delay=0) as queue:
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(3)])
        everything = [{"n": n} for n in range(3)]
        for round_ in range(3):
            messages = await scene.queen.queue(queue).batch(3).timeout_millis(5000).pop()
            assert payloads(messages) == everything, (round_, messages)
            answer = await scene.queen.ack(messages, False, {"error": f"round {round_}"})
            assert [result["dlq"] for result in answer["results"]] == [round_ == 2] * 3, (round_, answer)
        found = await scene.queen.queue(queue).dlq().get()
        assert sorted(payloads(found["messages"]), key=lambda data: int(data["n"])) == everything, found
        assert {letter["errorMessage"] for letter in found["messages"]} == {"round 2"}, found
        assert await scene.queen.queue(queue).wait(False).pop() == []


@scenario()
async def the_status_dlq_skips_the_retries(scene: Scene) -> None:
    async with scene.queue(retry_limit=9) as queue:
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(2)])
        [message] = await scene.queen.queue(queue).wait(False).pop()
        answer = await scene.queen.ack(message, "dlq", {"error": "poison"})
        assert answer["success"] is True and answer["dlq"] is True, answer
        found = await scene.queen.queue(queue).dlq().get()
        assert payloads(found["messages"]) == [{"n": 0}], found
        assert payloads(await scene.queen.queue(queue).wait(False).pop()) == [{"n": 1}]


@scenario()
async def dead_letters_are_found_by_group_partition_time_and_page(scene: Scene) -> None:
    async with scene.queue(retry_limit=0) as queue:
        for partition in ("a", "b"):
            await (
                scene.queen.queue(queue)
                .partition(partition)
                .push([{"data": {"in": partition, "n": n}} for n in (0, 1)])
            )
            messages = await scene.queen.queue(queue).partition(partition).group("g").batch(2).wait(False).pop()
            answer = await scene.queen.ack(messages, False, {"group": "g", "error": "no"})
            assert [result["dlq"] for result in answer["results"]] == [True, True], answer
        builder = scene.queen.queue(queue)
        assert (await builder.dlq("g").get())["total"] == 4
        assert (await builder.dlq("somebody-else").get())["total"] == 0
        in_b = await scene.queen.queue(queue).partition("b").dlq("g").get()
        assert in_b["total"] == 2 and {letter["partition"] for letter in in_b["messages"]} == {"b"}, in_b
        pages = [await builder.dlq("g").limit(3).offset(offset).get() for offset in (0, 3)]
        assert [len(page["messages"]) for page in pages] == [3, 1], pages
        assert len({letter["id"] for page in pages for letter in page["messages"]}) == 4, pages
        now = datetime.now(UTC)
        hour = timedelta(hours=1)
        around = await builder.dlq("g").from_((now - hour).isoformat()).to((now + hour).isoformat()).get()
        assert around["total"] == 4, around
        assert (await builder.dlq("g").from_((now + hour).isoformat()).get())["total"] == 0


@scenario()
async def dead_letters_of_an_encrypted_queue_are_readable(scene: Scene) -> None:
    async with scene.queue(retry_limit=0, encryption_enabled=True) as queue:
        await scene.queen.queue(queue).push([{"data": {"secret": "x"}}])
        [message] = await scene.queen.queue(queue).wait(False).pop()
        await scene.queen.ack(message, False, {"error": "no"})
        assert payloads((await scene.queen.queue(queue).dlq().get())["messages"]) == [{"secret": "x"}]
