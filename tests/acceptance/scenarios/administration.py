"""The client's administrative calls."""

from __future__ import annotations

from typing import Any

from tests.acceptance.scenario import Message, Scene, payloads, scenario

COUNTERS = {"total", "pending", "processing", "completed", "failed", "deadLetter"}


@scenario()
async def the_overview_counts_what_there_is(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {}}])
        overview = await scene.queen.admin.get_overview()
        assert overview["queues"] >= 1 and overview["partitions"] >= 1, overview
        assert set(overview["messages"]) >= COUNTERS, overview
        assert overview["messages"]["total"] >= 1, overview
        assert set(overview) >= {"namespaces", "tasks", "lag", "throughput", "timestamp", "statsAge"}, overview
        assert set(overview["lag"]) >= {"time", "offset"}, overview


@scenario()
async def queues_are_listed_by_namespace_and_task(scene: Scene) -> None:
    queue, namespace, task = scene.queue_name(), scene.queue_name("namespace"), scene.queue_name("task")
    await scene.queen.queue(queue).namespace(namespace).task(task).create()
    await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(3)])

    [by_namespace] = _named((await scene.queen.admin.get_namespaces())["namespaces"], "namespace", namespace)
    assert by_namespace["queues"] == 1 and by_namespace["messages"] == {"total": 3, "pending": 3}, by_namespace
    [by_task] = _named((await scene.queen.admin.get_tasks())["tasks"], "task", task)
    assert by_task["queues"] == 1 and by_task["messages"] == {"total": 3, "pending": 3}, by_task
    [listed] = _named((await scene.queen.admin.list_queues(limit=1000))["queues"], "name", queue)
    assert (listed["namespace"], listed["task"], listed["partitions"]) == (namespace, task, 1), listed
    assert listed["messages"] == {"total": 3, "pending": 3, "processing": 0}, listed


@scenario()
async def a_queue_made_by_a_push_has_its_namespace_from_the_dots_of_its_name(scene: Scene) -> None:
    queue = "test-billing.invoices.monthly"
    await scene.queen.queue(queue).push([{"data": {}}])
    seen = await scene.queen.admin.get_queue(queue)
    assert (seen["namespace"], seen["task"]) == ("test-billing", "invoices"), seen


@scenario()
async def a_queue_shows_its_partitions_and_counters(scene: Scene) -> None:
    async with scene.queue(retry_limit=0) as queue:
        for partition in ("a", "b"):
            items = [{"data": {"n": n}} for n in range(4)]
            await scene.queen.queue(queue).partition(partition).push(items)
        messages = await scene.queen.queue(queue).partition("a").batch(3).wait(False).pop()
        await scene.queen.ack(messages[0], True)
        seen = await scene.queen.admin.get_queue(queue)
        assert seen["name"] == queue and seen["id"] and seen["createdAt"], seen
        partitions = {partition["name"]: partition for partition in seen["partitions"]}
        assert set(partitions) >= {"a", "b"}, seen
        assert set(partitions["a"]["stats"]) == COUNTERS, seen
        assert partitions["a"]["stats"]["total"] == 4 and partitions["a"]["stats"]["processing"] == 2, seen
        assert partitions["b"]["stats"]["pending"] == 4, seen
        assert seen["totals"]["total"] == 8, seen
        listed = await scene.queen.admin.get_partitions(queue=queue)
        assert {"a", "b"} <= {partition["name"] for partition in listed["partitions"]}, listed


@scenario()
async def an_unknown_queue_is_not_found(scene: Scene) -> None:
    error = await _refusal(scene.queen.admin.get_queue(scene.queue_name()))
    assert error == "Queue not found", error


@scenario()
async def a_cleared_queue_is_empty_and_works_on(scene: Scene) -> None:
    async with scene.queue(lease_time=77) as queue:
        for partition in ("a", "b"):
            await scene.queen.queue(queue).partition(partition).push([{"data": {"in": partition}}])
        await scene.queen.admin.clear_queue(queue, "a")
        assert payloads(await scene.queen.queue(queue).group("g").batch(10).partitions(10).wait(False).pop()) == [
            {"in": "b"}
        ]
        await scene.queen.admin.clear_queue(queue)
        assert await scene.queen.queue(queue).batch(10).wait(False).pop() == []
        await scene.queen.queue(queue).partition("a").push([{"data": {"again": True}}])
        assert payloads(await scene.queen.queue(queue).wait(False).pop()) == [{"again": True}]


@scenario()
async def messages_are_listed_and_shown(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"transactionId": f"m{n}", "data": {"n": n}} for n in range(3)])
        listed = await scene.queen.admin.list_messages(queue=queue)
        assert [message["transactionId"] for message in listed["messages"]] == ["m2", "m1", "m0"], listed
        assert {message["status"] for message in listed["messages"]} == {"pending"}, listed
        assert listed["messages"][0]["queuePath"] == f"{queue}/Default", listed
        page = await scene.queen.admin.list_messages(queue=queue, limit=1, offset=1)
        assert [message["transactionId"] for message in page["messages"]] == ["m1"], page

        shown = await scene.queen.admin.get_message(listed["messages"][0]["partitionId"], "m2")
        assert shown["payload"] == {"n": 2} and shown["status"] == "pending", shown
        assert shown["queueConfig"]["leaseTime"] == 300, shown

        popped = await scene.queen.queue(queue).batch(2).wait(False).pop()
        await scene.queen.ack(popped[0], True)
        after = await scene.queen.admin.list_messages(queue=queue)
        assert [message["status"] for message in after["messages"]] == ["processing", "processing", "completed"], after
        completed = await scene.queen.admin.list_messages(queue=queue, status="completed")
        assert [message["transactionId"] for message in completed["messages"]] == ["m0"], completed


@scenario()
async def an_unknown_message_is_not_found(scene: Scene) -> None:
    async with scene.queue() as queue:
        [pushed] = await scene.queen.queue(queue).push([{"data": {}}])
        error = await _refusal(scene.queen.admin.get_message(pushed["partition_id"], "nobody"))
        assert error == "Message not found", error


@scenario()
async def a_deleted_message_is_not_delivered(scene: Scene) -> None:
    async with scene.queue() as queue:
        [pushed] = await scene.queen.queue(queue).push([{"transactionId": "m0", "data": {"n": 0}}])
        await scene.queen.queue(queue).push([{"transactionId": "m1", "data": {"n": 1}}])
        answer = await scene.queen.admin.delete_message(pushed["partition_id"], "m0")
        assert answer["success"] is True, answer
        assert payloads(await scene.queen.queue(queue).batch(10).wait(False).pop()) == [{"n": 1}]


@scenario()
async def deleting_an_unknown_message_answers_that_there_is_none(scene: Scene) -> None:
    async with scene.queue() as queue:
        [pushed] = await scene.queen.queue(queue).push([{"data": {}}])
        answer = await scene.queen.admin.delete_message(pushed["partition_id"], "nobody")
        assert answer["success"] is False and answer["message"] == "Message not found", answer


@scenario()
async def a_message_is_moved_to_the_dead_letters_and_retried_from_there(scene: Scene) -> None:
    async with scene.queue(retry_limit=0) as queue:
        await scene.queen.queue(queue).push([{"transactionId": "m0", "data": {"n": 0}}])
        [message] = await scene.queen.queue(queue).wait(False).pop()
        await scene.queen.ack(message, False, {"error": "no"})
        assert (await scene.queen.queue(queue).dlq().get())["total"] == 1
        await scene.queen.admin.retry_message(message["partitionId"], "m0")
        assert (await scene.queen.queue(queue).dlq().get())["total"] == 0
        [again] = await scene.queen.queue(queue).wait(False).pop()
        assert again["data"] == {"n": 0}, again

        await scene.queen.queue(queue).partition("other").push([{"transactionId": "m1", "data": {"n": 1}}])
        [other] = await scene.queen.queue(queue).partition("other").group("g").wait(False).pop()
        await scene.queen.admin.move_message_to_dlq(other["partitionId"], "m1")
        letters = (await scene.queen.queue(queue).partition("other").dlq().get())["messages"]
        assert payloads(letters) == [{"n": 1}], letters


@scenario()
async def trace_names_are_listed(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(2)])
        name = scene.queue_name("a name/with a slash")

        async def handle(message: Message) -> None:
            traced = await message["trace"]({"traceName": name, "data": {"seen": message["data"]}})
            assert traced["success"] is True, traced

        await scene.queen.queue(queue).limit(2).consume(handle)
        [listed] = _named((await scene.queen.admin.get_trace_names(limit=1000))["trace_names"], "trace_name", name)
        assert listed["trace_count"] == 2 and listed["message_count"] == 2 and listed["last_seen"], listed


@scenario()
async def consumer_groups_are_listed_with_their_lag(scene: Scene) -> None:
    async with scene.queue() as queue:
        group = scene.queue_name("group")
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(5)])
        messages = await scene.queen.queue(queue).group(group).batch(2).wait(False).pop()
        await scene.queen.ack(messages, True, {"group": group})

        [listed] = _named(await scene.queen.admin.list_consumer_groups(), "name", group)
        assert listed["queueName"] == queue and listed["topics"] == [queue], listed
        assert listed["members"] == 1 and listed["partitionsWithLag"] == 1, listed
        assert listed["state"] == "Stable", listed

        detail = await scene.queen.admin.get_consumer_group(group)
        assert list(detail) == [queue], detail
        [partition] = detail[queue]["partitions"]
        assert (partition["partition"], partition["totalConsumed"], partition["offsetLag"]) == ("Default", 2, 3), detail
        assert partition["leaseActive"] is False, detail

        lagging = await scene.queen.admin.get_lagging_consumers(3600)
        assert not _named(lagging or [], "consumer_group", group), lagging


@scenario()
async def an_unknown_group_is_empty(scene: Scene) -> None:
    assert not await scene.queen.admin.get_consumer_group(scene.queue_name())
    answer = await scene.queen.delete_consumer_group(scene.queue_name())
    assert answer["success"] is True and answer["deletedPartitions"] == 0, answer


@scenario()
async def statistics_are_refreshed_on_demand(scene: Scene) -> None:
    answer = await scene.queen.admin.refresh_consumer_stats()
    assert set(answer) >= {"queue", "namespace", "task", "system"} or answer.get("skipped") is True, answer


@scenario()
async def the_server_is_healthy(scene: Scene) -> None:
    health = await scene.queen.admin.health()
    assert (health["status"], health["database"]) == ("healthy", "connected"), health


@scenario()
async def the_status_shows_throughput_and_queues(scene: Scene) -> None:
    async with scene.queue() as queue:
        await scene.queen.queue(queue).push([{"data": {"n": n}} for n in range(3)])
        status = await scene.queen.admin.get_status()
        expected = {"timeRange", "throughput", "queues", "messages", "leases", "deadLetterQueue", "workers", "errors"}
        assert set(status) >= expected, status
        stats = await scene.queen.admin.get_queue_stats(limit=1000)
        [listed] = _named(stats["queues"], "name", queue)
        assert listed["messages"]["pending"] == 3, listed
        detail = await scene.queen.admin.get_queue_detail(queue)
        assert detail["queue"]["name"] == queue and detail["totals"]["total"] == 3, detail
        assert detail["queue"]["config"]["maxQueueSize"] == 0, detail
        analytics = await scene.queen.admin.get_analytics(interval="minute", queue=queue)
        assert sum(point["messages"] for point in analytics["dataPoints"]) == 3, analytics


@scenario()
async def metrics_are_served(scene: Scene) -> None:
    metrics = await scene.queen.admin.metrics()
    assert set(metrics) >= {"uptime", "requests", "messages", "database", "memory", "cpu"}, metrics


@scenario()
async def metrics_of_system_workers_and_postgres_are_served(scene: Scene) -> None:
    system = await scene.queen.admin.get_system_metrics()
    assert set(system) >= {"timeRange", "replicas", "replicaCount", "bucketMinutes"}, system
    workers = await scene.queen.admin.get_worker_metrics()
    assert set(workers) >= {"timeRange", "timeSeries", "workers", "queues", "summary"}, workers
    postgres = await scene.queen.admin.get_postgres_stats()
    assert set(postgres) >= {"databaseCache", "tableCache", "deadTuples", "activeQueries", "tableSizes"}, postgres


def _named(rows: list[dict[str, Any]], key: str, value: str) -> list[dict[str, Any]]:
    return [row for row in rows if row[key] == value]


async def _refusal(call: Any) -> str:
    """The text of the error that a call raises."""
    try:
        answer = await call
    except Exception as error:
        return str(error)
    raise AssertionError(f"answered: {answer}")
