"""Workers that die or are stopped: no task is lost, and none runs twice but those that were running."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from celery import chord

from tests.celery.queues import Namespace
from tests.celery.worker import celery_worker, load_tasks
from tests.support.ageing import block_until
from tests.support.host import Host


def test_kill_loses_no_task_and_doubles_only_what_was_running(
    namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = load_tasks(namespace.url, tmp_path, monkeypatch)
    journal, gate = tmp_path / "journal", tmp_path / "gate"
    names = [f"task{number}" for number in range(6)]

    with celery_worker(namespace.url, tmp_path, "first", "-P", "solo", lease=2) as first:
        for name in names:
            tasks.hold.delay(name, str(gate))
        block_until(lambda: journal.exists() and journal.read_text(), "the first task to start")
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
    tasks = load_tasks(namespace.url, tmp_path, monkeypatch)
    journal, gate = tmp_path / "journal", tmp_path / "gate"
    with celery_worker(namespace.url, tmp_path, "stopped", "-P", "threads", "-c", "1", lease=2) as worker:
        for name in ("one", "two", "three"):
            tasks.hold.delay(name, str(gate))
        block_until(lambda: journal.exists() and journal.read_text(), "the first task to start")
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


def test_what_tasks_return_while_the_server_is_gone_is_stored_when_it_is_back(
    celery_host: Host, namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = load_tasks(namespace.url, tmp_path, monkeypatch)
    journal, gate = tmp_path / "journal", tmp_path / "gate"
    with (
        ThreadPoolExecutor() as pool,
        celery_worker(namespace.url, tmp_path, "patient", "-P", "prefork", "-c", "3", lease=100) as worker,
    ):
        single = tasks.hold.delay("single", str(gate))
        whole = chord((tasks.hold.s(name, str(gate)) for name in ("left", "right")), tasks.joined.s())()
        block_until(lambda: journal.exists() and journal.read_text().count("start ") == 3, "all tasks to start")
        celery_host.stop()
        try:
            gate.touch()
            waiting = pool.submit(single.get, timeout=100)
            block_until(lambda: journal.read_text().count("end ") == 3, "all tasks to end")
        finally:
            celery_host.start()
        assert waiting.result() == "single"
        assert sorted(whole.get(timeout=100).split()) == ["left", "right"]
        block_until(lambda: namespace.counts("celery")["leased"] == 0, "the last ack")
        assert journal.read_text().count("start ") == 3
        assert "raised unexpected" not in worker.text()
    tasks.app.close()


def test_a_worker_connects_again_after_an_outage_that_outlasts_its_leases(
    celery_host: Host, namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = load_tasks(namespace.url, tmp_path, monkeypatch)
    journal, gate = tmp_path / "journal", tmp_path / "gate"
    gate.touch()
    # Its heartbeats, which are events, would wait for the server themselves.
    with celery_worker(namespace.url, tmp_path, "again", "-P", "solo", "--without-heartbeat", lease=1) as worker:
        tasks.hold.delay("before", str(gate)).get(timeout=100)
        block_until(lambda: namespace.counts("celery")["leased"] == 0, "the first ack")
        celery_host.stop()
        try:
            block_until(lambda: "Trying again in" in worker.text(), "the worker to have lost its connection")
        finally:
            celery_host.start()
        asyncio.run(celery_host.ready())
        assert tasks.hold.delay("after", str(gate)).get(timeout=100) == "after"
        assert tasks.app.control.ping(timeout=100, limit=1) == [{"again@test": {"ok": "pong"}}]
        block_until(lambda: namespace.counts("celery")["leased"] == 0, "the last ack")
    assert journal.read_text().splitlines() == ["start before", "end before", "start after", "end after"]
    tasks.app.close()
