"""Run by the Python that has Airflow: operators, sensor and trigger by themselves, on the server of QUEEN_URL."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from airflow.sdk.exceptions import TaskDeferred

from queen import QueenSync
from queen.airflow.hook import QueenHook
from queen.airflow.jobs import QueenArchiveOperator, QueenPipelineOperator, QueenReplayOperator
from queen.airflow.lag import QueenLagSensor, QueenLagTrigger
from queen.airflow.operators import QueenConsumeOperator, QueenPushOperator
from queen.errors import QueenError

URL = os.environ["QUEEN_URL"]
CONTEXT = {"ti": SimpleNamespace(dag_id="shop", run_id="monday", task_id="push", map_index=-1)}


@pytest.fixture(autouse=True)
def connections(monkeypatch: pytest.MonkeyPatch) -> None:
    server = urlsplit(URL)
    found = {"conn_type": "queen", "host": server.hostname, "port": server.port}
    monkeypatch.setenv("AIRFLOW_CONN_QUEEN_DEFAULT", json.dumps(found))
    monkeypatch.setenv("AIRFLOW_CONN_NOBODY", json.dumps(found | {"port": 9, "extra": {"timeout_seconds": 1}}))
    monkeypatch.setenv("AIRFLOW_CONN_TYPO", json.dumps(found | {"extra": {"tsl": True}}))


@pytest.fixture
def name() -> str:
    return f"air-{uuid.uuid4().hex[:8]}"


def push(name: str, messages: Any, **options: Any) -> Any:
    return QueenPushOperator(task_id="push", queue_name=name, messages=messages, **options).execute(CONTEXT)


def consume(name: str, **options: Any) -> Any:
    operator = QueenConsumeOperator(task_id="consume", queue_name=name, consumer_group="etl", **options)
    return operator.execute(CONTEXT)


def test_a_task_that_is_tried_again_pushes_nothing_twice(name: str) -> None:
    orders = [{"order": number, "shop": f"s{number % 2}"} for number in range(5)]
    assert push(name, orders, partition_by="shop") == {"queued": 5, "duplicates": 0}
    assert push(name, orders, partition_by="shop") == {"queued": 0, "duplicates": 5}
    assert push(name, orders, partition_by=lambda order: "all", deduplicate=False) == {"queued": 5, "duplicates": 0}
    assert len(consume(name)) == 10


def test_large_messages_are_pushed_in_requests_that_a_server_takes(name: str) -> None:
    large = [{"order": number, "text": "x" * 1_000_000} for number in range(68)]
    assert push(name, large) == {"queued": 68, "duplicates": 0}
    # Each has the id of its place in the whole list.
    assert push(name, large[:-1]) == {"queued": 0, "duplicates": 67}
    assert [payload["order"] for payload in consume(name)] == list(range(68))


def test_wrong_arguments_of_a_push(name: str) -> None:
    with pytest.raises(QueenError, match="partition_by 'store' is not a field of"):
        push(name, [{"shop": 1}], partition_by="store")
    with pytest.raises(QueenError, match="messages must be a list, not str; for the result of a task give the task"):
        push(name, "[1, 2]")
    with pytest.raises(QueenError, match="give one of the two"):
        push(name, [], partition="a", partition_by="shop")


def test_messages_come_again_when_the_handler_fails(name: str) -> None:
    push(name, [1, 2, 3])
    got: list[Any] = []

    def fail(messages: list[Any]) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        consume(name, handler=fail)

    def keep(messages: list[Any]) -> None:
        got.extend(message["data"] for message in messages)

    # What failed comes again after a second.
    assert consume(name, handler=keep, batch=2, max_messages=3, wait_seconds=20) == 3
    assert got == [1, 2, 3]
    assert consume(name, max_messages=5) == []


def test_no_more_is_consumed_than_wanted(name: str) -> None:
    push(name, list(range(10)))
    assert consume(name, max_messages=4, batch=3) == [0, 1, 2, 3]
    assert len(consume(name, max_messages=100)) == 6
    with pytest.raises(QueenError, match="batch must be a number from 1 on, not 0"):
        consume(name, batch=0)


def sensor(name: str, **options: Any) -> QueenLagSensor:
    return QueenLagSensor(task_id="wait", queue_name=name, consumer_group="etl", **options)


async def first(trigger: QueenLagTrigger) -> Any:
    return (await anext(trigger.run())).payload


def test_a_sensor_is_deferred_until_the_lag_is_as_wanted(name: str) -> None:
    push(name, [1, 2, 3])
    assert sensor(name, at_least=3, deferrable=True).execute(CONTEXT) == 3
    with pytest.raises(TaskDeferred) as deferred:
        sensor(name, at_most=0, deferrable=True, poke_interval=0.1).execute(CONTEXT)
    path, arguments = deferred.value.trigger.serialize()
    assert path == "queen.airflow.lag.QueenLagTrigger"
    again = QueenLagTrigger(**json.loads(json.dumps(arguments)))

    async def wait() -> Any:
        event = asyncio.create_task(first(again))
        await asyncio.to_thread(consume, name)
        return await event

    event = asyncio.run(wait())
    assert event == {"lag": 0}
    assert sensor(name, at_most=0).resume(CONTEXT, event) == 0


def test_a_queue_that_does_not_exist(name: str) -> None:
    assert sensor(name, at_least=1).poke(CONTEXT) is False
    with pytest.raises(QueenError, match=f"lag of group 'etl' on queue '{name}' <= 0: "):
        sensor(name, at_most=0).poke(CONTEXT)
    trigger = QueenLagTrigger(name, "etl", at_most=0)
    event = asyncio.run(first(trigger))
    with pytest.raises(QueenError, match=name):
        sensor(name, at_most=0).resume(CONTEXT, event)


def test_a_server_that_is_unavailable_is_asked_again(name: str) -> None:
    assert sensor(name, at_most=0, queen_conn_id="nobody").poke(CONTEXT) is False


def test_wrong_bounds(name: str) -> None:
    with pytest.raises(QueenError, match="at_most or at_least"):
        sensor(name)
    with pytest.raises(QueenError, match="at_least must be a number from 0 on, not -1"):
        sensor(name, at_least=-1)


def test_a_connection_says_whether_it_works() -> None:
    assert QueenHook().test_connection() == (True, f"connected to {URL}")
    assert QueenHook("nobody").test_connection()[0] is False
    assert QueenHook("typo").test_connection() == (
        False,
        "connection 'typo': unknown extra 'tsl'; did you mean 'tls'?",
    )
    with QueenHook().get_conn() as queen:
        assert isinstance(queen, QueenSync)


def test_commands_of_jobs() -> None:
    pipeline = QueenPipelineOperator(task_id="a", pipeline="leads.py", fail_on_data_loss=False)
    assert pipeline.command() == ["run", "leads.py", "--once", "--no-fail-on-data-loss"]
    archive = QueenArchiveOperator(task_id="b", queue_names=["x", "y"], to="/data", consumer_group="archive")
    assert archive.command() == ["archive", "x", "y", "--to", "/data", "--once", "--group", "archive"]
    replay = QueenReplayOperator(task_id="c", archive="/data", queue_names="x", to="z", speed=10, new_ids=True)
    assert replay.command() == ["replay", "/data", "--queue", "x", "--to", "z", "--speed", "10", "--new-ids"]


def test_a_job_that_fails_says_what_the_command_said() -> None:
    operator = QueenPipelineOperator(task_id="a", pipeline="nowhere.yaml", executable=os.environ["QUEEN_EXECUTABLE"])
    with pytest.raises(QueenError, match=r"queen pipeline run exited with 1:\n(.|\n)*nowhere\.yaml"):
        operator.execute(CONTEXT)
    missing = QueenPipelineOperator(task_id="b", pipeline="a.yaml", executable="/nowhere/queen")
    with pytest.raises(QueenError, match="there is no executable /nowhere/queen"):
        missing.execute(CONTEXT)
