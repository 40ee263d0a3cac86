"""Clients other than boto3: the AWS CLI, aiobotocore, Celery, and dramatiq with dramatiq-sqs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dramatiq
import pytest
from aiobotocore.session import get_session
from dramatiq_sqs import SQSBroker

from tests.acceptance.served import Served
from tests.http.sqs.conftest import Client, attribute, sqs_client
from tests.support.ageing import block_until

_KEYS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "eu-central-1"}


def test_the_aws_cli_sends_and_receives(sqs_server: Served) -> None:
    def aws(*arguments: str) -> Any:
        command = [sys.executable, "-m", "awscli", "--endpoint-url", f"{sqs_server.url}/sqs", "sqs", *arguments]
        done = subprocess.run(command, env=os.environ | _KEYS, capture_output=True, text=True, check=True, timeout=60)
        return json.loads(done.stdout) if done.stdout else None

    url = aws("create-queue", "--queue-name", "cli")["QueueUrl"]
    aws("send-message", "--queue-url", url, "--message-body", "from the shell")
    (message,) = aws("receive-message", "--queue-url", url, "--wait-time-seconds", "5")["Messages"]
    assert message["Body"] == "from the shell"
    aws("delete-message", "--queue-url", url, "--receipt-handle", message["ReceiptHandle"])


async def test_aiobotocore_receives_while_it_sends(sqs_server: Served) -> None:
    session = get_session()
    keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any", "region_name": "eu-central-1"}
    async with session.create_client("sqs", endpoint_url=f"{sqs_server.url}/sqs", **keys) as sqs:
        url = (await sqs.create_queue(QueueName="aio"))["QueueUrl"]

        async def consume() -> list[str]:
            seen: list[str] = []
            while len(seen) < 20:
                answer = await sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=10)
                for message in answer["Messages"]:
                    seen.append(message["Body"])
                    await sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
            return seen

        consuming = asyncio.ensure_future(consume())
        await asyncio.gather(*(sqs.send_message(QueueUrl=url, MessageBody=str(n)) for n in range(20)))
        assert sorted(await consuming, key=int) == [str(n) for n in range(20)]
        await sqs.delete_queue(QueueUrl=url)


@pytest.mark.soak
def test_dramatiq_runs_tasks_and_retries_them(sqs_server: Served) -> None:
    broker = SQSBroker(
        namespace="dramatiq",
        endpoint_url=f"{sqs_server.url}/sqs",
        region_name="eu-central-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
    )
    seen: list[int] = []

    @dramatiq.actor(broker=broker, max_retries=1, min_backoff=1, max_backoff=1)
    def double(number: int) -> None:
        seen.append(2 * number)
        if number == 3 and seen.count(6) == 1:
            raise ValueError("once more")

    worker = dramatiq.Worker(broker, worker_threads=2, worker_timeout=100)
    worker.start()
    try:
        for number in range(5):
            double.send(number)
        block_until(lambda: sorted(seen) == [0, 2, 4, 6, 6, 8], "all tasks have run, one of them twice")
    finally:
        worker.stop()
        broker.close()


@pytest.mark.soak
def test_celery_runs_tasks(sqs: Client, sqs_server: Served) -> None:
    # It has its own way of forking and of reading URLs, so it runs in processes of its own.
    code = """
import sys
from celery import Celery
from celery.contrib.testing.worker import start_worker
app = Celery(broker=sys.argv[1], backend="cache+memory://")
app.conf.broker_transport_options = {"is_secure": False, "region": "eu-central-1", "wait_time_seconds": 1}
app.conf.task_default_queue = "celery-tasks"
app.conf.worker_hijack_root_logger = False
app.conf.worker_enable_remote_control = False

@app.task(bind=True, acks_late=True, max_retries=1)
def add(self, a, b):
    if self.request.retries == 0 and a == 2:
        raise self.retry(countdown=0)
    return a + b

with start_worker(app, perform_ping_check=False, pool="threads", concurrency=2):
    results = [add.delay(n, 40) for n in range(4)]
    print([one.get(timeout=60) for one in results])
"""
    address = urlsplit(sqs_server.url)
    broker = f"sqs://any:any@{address.netloc}"
    command = [sys.executable, "-c", code, broker]
    done = subprocess.run(command, env=os.environ | _KEYS, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "[40, 41, 42, 43]", done.stderr
    url = sqs.get_queue_url(QueueName="celery-tasks")["QueueUrl"]
    assert attribute(sqs, url, "ApproximateNumberOfMessages") == "0"
    assert attribute(sqs, url, "ApproximateNumberOfMessagesNotVisible") == "0"


def test_a_client_at_another_path_than_the_endpoint_uses_the_addresses_it_is_given(sqs_server: Served) -> None:
    at_root = sqs_client(sqs_server.url, path="")
    url = at_root.create_queue(QueueName="root")["QueueUrl"]
    assert url == f"{sqs_server.url}/sqs/000000000000/root"
    at_root.send_message(QueueUrl=url, MessageBody="x")
    assert len(at_root.receive_message(QueueUrl=url, WaitTimeSeconds=5)["Messages"]) == 1


@pytest.mark.soak
@pytest.mark.parametrize("packages", [("boto3==1.28.80", "botocore==1.31.80"), ("aioboto3==15.5.0",)])
def test_clients_that_need_an_older_sdk_run(sqs_server: Served, tmp_path: Path, packages: tuple[str, ...]) -> None:
    # They do not go together with the SDK that is installed here.
    pip = [sys.executable, "-m", "pip", "--quiet", "install", "--target", str(tmp_path), *packages]
    subprocess.run(pip, check=True, capture_output=True)
    program = Path(__file__).with_name("other_clients.py")
    command = [sys.executable, str(program), packages[0].partition("=")[0], f"{sqs_server.url}/sqs"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
