"""Workers that die or are stopped: no task is lost, and none runs twice but those that were running."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest

from tests.celery.queues import Namespace
from tests.celery.worker import celery_worker, environment
from tests.support.ageing import block_until


def test_kill_loses_no_task_and_doubles_only_what_was_running(
    namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(namespace.url, tmp_path).items():
        monkeypatch.setenv(name, value)
    tasks = importlib.reload(importlib.import_module("tests.celery.tasks"))
    journal, gate = tmp_path / "journal", tmp_path / "gate"
    names = [f"task{number}" for number in range(6)]

    with celery_worker(namespace.url, tmp_path, "first", "-P", "solo", lease=2) as first:
        for name in names:
            tasks.hold.delay(name, str(gate))
        block_until(journal.exists, "the first task to start")
        first.kill()
    (running,) = journal.read_text().split("\n")[:-1]
    gate.touch()
    with celery_worker(namespace.url, tmp_path, "second", "-P", "solo", lease=2):
        block_until(lambda: journal.read_text().count("end ") == len(names), "all tasks")
        block_until(lambda: namespace.counts("celery")["leased"] == 0, "the last ack")
    lines = Counter(journal.read_text().splitlines())
    assert lines == Counter(
        {**{f"start {name}": 1 for name in names}, **{f"end {name}": 1 for name in names}}
    ) + Counter([running])
    assert namespace.counts("celery")["dead"] == 0
    tasks.app.close()


def test_a_worker_that_is_stopped_finishes_its_task_and_gives_back_the_others(
    namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(namespace.url, tmp_path).items():
        monkeypatch.setenv(name, value)
    tasks = importlib.reload(importlib.import_module("tests.celery.tasks"))
    journal, gate = tmp_path / "journal", tmp_path / "gate"
    with celery_worker(namespace.url, tmp_path, "stopped", "-P", "threads", "-c", "1", lease=2) as worker:
        for name in ("one", "two", "three"):
            tasks.hold.delay(name, str(gate))
        block_until(journal.exists, "the first task to start")
        worker.process.terminate()
        block_until(lambda: "Warm shutdown" in worker.text(), "the worker to notice")
        block_until(lambda: namespace.counts("celery")["ready"] == 2, "the others to be ready again")
        gate.touch()
        worker.process.wait(60)
    started = [line for line in journal.read_text().splitlines() if line.startswith("start")]
    ended = [line for line in journal.read_text().splitlines() if line.startswith("end")]
    assert len(started) == len(ended) == 1
    counts = namespace.counts("celery")
    assert (counts["ready"], counts["leased"]) == (2, 0)
    tasks.app.close()
