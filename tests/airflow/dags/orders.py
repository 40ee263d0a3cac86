"""A DAG with everything of the provider: push, wait for the lag, consume, a pipeline, an archive, a replay."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, task

from queen.airflow.jobs import QueenArchiveOperator, QueenPipelineOperator, QueenReplayOperator
from queen.airflow.lag import QueenLagSensor
from queen.airflow.operators import QueenConsumeOperator, QueenPushOperator

WORK = Path(os.environ["QUEEN_TEST_DIRECTORY"])
JOB: dict[str, Any] = {
    "master": "local[1]",
    "data_dir": str(WORK / "data"),
    "env": {"PYTHONPATH": os.environ["QUEEN_TEST_SOURCE"]},
}


def load(messages: list[dict[str, Any]]) -> None:
    with (WORK / "loaded").open("a") as file:
        file.writelines(f"{message['data']['order']}\n" for message in messages)


with DAG("orders", schedule=None, catchup=False) as orders:

    @task
    def read() -> list[dict[str, int]]:
        return [{"order": number, "shop": number % 3} for number in range(20)]

    push = QueenPushOperator(task_id="push", queue_name="air-orders", messages=read(), partition_by="shop")
    arrived = QueenLagSensor(
        task_id="arrived", queue_name="air-orders", consumer_group="etl", at_least=20, poke_interval=1, timeout=60
    )
    consume = QueenConsumeOperator(
        task_id="consume", queue_name="air-orders", consumer_group="etl", handler=load, batch=7
    )
    caught_up = QueenLagSensor(
        task_id="caught_up",
        queue_name="air-orders",
        consumer_group="etl",
        at_most=0,
        poke_interval=timedelta(seconds=1),
        timeout=60,
        deferrable=True,
    )
    shared = QueenConsumeOperator(
        task_id="shared", queue_name="air-orders", consumer_group="others-{{ run_id }}", max_messages=5
    )
    push >> arrived >> consume >> caught_up >> shared

with DAG("jobs", schedule=None, catchup=False) as jobs:
    archive = QueenArchiveOperator(task_id="archive", queue_names=["air-orders"], to=str(WORK / "archive"), **JOB)
    replay = QueenReplayOperator(
        task_id="replay",
        archive=str(WORK / "archive"),
        queue_names=["air-orders"],
        to="air-again",
        condition="get_json_object(payload, '$.order') >= 15",
        **JOB,
    )
    pipeline = QueenPipelineOperator(task_id="pipeline", pipeline=str(WORK / "orders.yaml"), **JOB)
    archive >> replay >> pipeline

with DAG("waits", schedule=None, catchup=False):
    QueenLagSensor(
        task_id="work",
        queue_name="air-work",
        consumer_group="etl",
        at_least=3,
        poke_interval=1,
        timeout=120,
        deferrable=True,
    )
