"""Queues: created, configured, deleted."""

from __future__ import annotations

from typing import Any

from tests.acceptance.scenario import Scene, payloads, scenario

DEFAULTS: dict[str, Any] = {
    "priority": 0,
    "leaseTime": 300,
    "retryLimit": 3,
    "retryDelay": 1000,
    "maxSize": 0,
    "ttl": 3600,
    "deadLetterQueue": False,
    "dlqAfterMaxRetries": False,
    "delayedProcessing": 0,
    "windowBuffer": 0,
    "retentionSeconds": 0,
    "completedRetentionSeconds": 0,
    "retentionEnabled": False,
    "encryptionEnabled": False,
    "maxWaitTimeSeconds": 0,
}


@scenario()
async def a_queue_is_created_with_the_defaults(scene: Scene) -> None:
    answer = await scene.queen.queue(scene.queue_name()).create()
    assert answer["configured"] is True, answer
    assert answer["queue"] == scene.queue_name(), answer
    _check_options(answer, DEFAULTS)


@scenario()
async def a_queue_is_deleted(scene: Scene) -> None:
    queue = scene.queue_name()
    await scene.queen.queue(queue).create()
    answer = await scene.queen.queue(queue).delete()
    assert answer["deleted"] is True, answer
    assert answer["existed"] is True, answer


@scenario()
async def deleting_a_queue_that_never_was_answers_deleted(scene: Scene) -> None:
    answer = await scene.queen.queue(scene.queue_name()).delete()
    assert answer["deleted"] is True, answer
    assert answer["existed"] is False, answer


@scenario()
async def configuring_echoes_what_was_sent(scene: Scene) -> None:
    sent = {
        "lease_time": 60,
        "retry_limit": 5,
        "priority": 7,
        "max_size": 5000,
        "encryption_enabled": True,
        "dlq_after_max_retries": True,
    }
    answer = await scene.queen.queue(scene.queue_name()).namespace("billing").task("ingest").config(sent).create()
    assert answer["configured"] is True, answer
    assert (answer["namespace"], answer["task"]) == ("billing", "ingest"), answer
    expected = {
        **DEFAULTS,
        "leaseTime": 60,
        "retryLimit": 5,
        "priority": 7,
        "maxSize": 5000,
        "encryptionEnabled": True,
        "dlqAfterMaxRetries": True,
    }
    _check_options(answer, expected)


@scenario()
async def every_option_is_echoed(scene: Scene) -> None:
    sent: dict[str, Any] = {
        "lease_time": 11,
        "retry_limit": 12,
        "retry_delay": 13,
        "max_size": 14,
        "ttl": 15,
        "dead_letter_queue": True,
        "dlq_after_max_retries": True,
        "priority": 16,
        "delayed_processing": 17,
        "window_buffer": 18,
        "retention_seconds": 19,
        "completed_retention_seconds": 20,
        "retention_enabled": True,
        "encryption_enabled": True,
        "max_wait_time_seconds": 21,
    }
    answer = await scene.queen.queue(scene.queue_name()).config(sent).create()
    assert len(sent) == len(DEFAULTS)
    _check_options(answer, {_camel_case(name): value for name, value in sent.items()})


@scenario()
async def configuring_again_resets_what_is_not_sent(scene: Scene) -> None:
    queue = scene.queen.queue(scene.queue_name())
    await queue.config({"retry_delay": 5, "lease_time": 7}).create()
    answer = await scene.queen.queue(scene.queue_name()).config({"lease_time": 9}).create()
    _check_options(answer, {**DEFAULTS, "leaseTime": 9})


@scenario()
async def configuring_again_keeps_the_messages(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push({"data": {"n": 1}})
        await scene.queen.queue(queue).config({"lease_time": 9}).create()
        assert payloads(await scene.queen.queue(queue).wait(False).pop()) == [{"n": 1}]


@scenario()
async def a_deleted_queue_takes_its_messages_along(scene: Scene) -> None:
    queue = scene.queue_name()
    await scene.queen.queue(queue).create()
    await scene.queen.queue(queue).push([{"transactionId": "one", "data": {"life": 1}}])
    await scene.queen.queue(queue).delete()
    assert await scene.queen.queue(queue).wait(False).pop() == []

    await scene.queen.queue(queue).create()
    assert await scene.queen.queue(queue).wait(False).pop() == []
    again = await scene.queen.queue(queue).push([{"transactionId": "one", "data": {"life": 2}}])
    assert again[0]["status"] == "queued", again
    assert payloads(await scene.queen.queue(queue).wait(False).pop()) == [{"life": 2}]


@scenario()
async def callbacks_of_create_and_delete_are_called(scene: Scene) -> None:
    answers = []

    async def note(answer: object) -> None:
        answers.append(answer)

    await scene.queen.queue(scene.queue_name()).create().on_success(note)
    await scene.queen.queue(scene.queue_name()).delete().on_success(note)
    assert len(answers) == 2, answers


def _check_options(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    """The options that the client knows are as expected; the server may have more."""
    assert {name: answer["options"].get(name) for name in DEFAULTS} == expected, answer


def _camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))
