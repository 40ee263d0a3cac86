"""The Celery application of the tests, run by a real worker; what its tasks do is written to a file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.exceptions import Reject

app = Celery(
    "tests.celery.tasks",
    broker=os.environ["QUEEN_TEST_URL"],
    backend=os.environ["QUEEN_TEST_URL"],
)
app.conf.update(
    broker_transport_options={"visibility_timeout": float(os.environ.get("QUEEN_TEST_LEASE", "30"))},
    broker_connection_retry_on_startup=True,
    result_backend_transport_options={"retry_policy": {"timeout": 100}},
    task_track_started=True,
    worker_send_task_events=True,
    task_send_sent_event=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
)

JOURNAL = Path(os.environ["QUEEN_TEST_JOURNAL"])


def note(line: str) -> None:
    """Append a line to the journal; short appends of several processes do not mix."""
    with JOURNAL.open("a") as journal:
        journal.write(line + "\n")


@app.task
def add(left: int, right: int) -> int:
    return left + right


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task
def joined(words: list[str]) -> str:
    return " ".join(words)


@app.task(bind=True)
def add_each_to_chord(self: Any, numbers: list[int], to: int) -> int:
    """Have the chord that it belongs to wait for further tasks."""
    for number in numbers:
        self.add_to_chord(add.s(number, to))
    return 0


@app.task(bind=True, max_retries=3)
def flaky(self: Any, failures: int) -> int:
    """Fail so many times, then succeed."""
    if self.request.retries < failures:
        raise self.retry(countdown=0.05)
    return int(self.request.retries)


@app.task
def journal(line: str) -> None:
    note(line)


@app.task(acks_late=True)
def hold(name: str, gate: str) -> str:
    """Note the start, wait for a file, note the end."""
    note(f"start {name}")
    while not Path(gate).exists():
        time.sleep(0.02)
    note(f"end {name}")
    return name


@app.task(bind=True, acks_late=True)
def rejected_once(self: Any) -> str:
    """Go back to the queue the first time."""
    if not self.request.delivery_info["redelivered"]:
        raise Reject("not now", requeue=True)
    return "done"
