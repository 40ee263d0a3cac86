"""Workers whose pool is gevent's, where that is installed."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from celery import chord

from tests.celery.queues import Namespace
from tests.celery.worker import celery_worker, environment
from tests.support.ageing import block_until


@pytest.mark.soak
def test_a_worker_of_green_threads_runs_tasks(
    namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gevent")
    for name, value in environment(namespace.url, tmp_path).items():
        monkeypatch.setenv(name, value)
    tasks = importlib.reload(importlib.import_module("tests.celery.tasks"))
    gate = tmp_path / "gate"
    with celery_worker(namespace.url, tmp_path, "gevent", "-P", "gevent", "-c", "4", lease=2):
        held = [tasks.hold.delay(str(number), str(gate)) for number in range(4)]
        journal = tmp_path / "journal"
        block_until(lambda: journal.exists() and journal.read_text().count("start ") == 4, "all four to run at once")
        # Their leases are renewed while they wait, and nobody else gets them.
        assert tasks.app.control.ping(timeout=100, limit=1) == [{"gevent@test": {"ok": "pong"}}]
        gate.touch()
        assert [result.get(timeout=60) for result in held] == ["0", "1", "2", "3"]
        assert chord((tasks.add.s(i, i) for i in range(3)), tasks.total.s())().get(timeout=60) == 6
        block_until(lambda: namespace.counts("celery")["leased"] == 0, "the last ack")
    assert journal.read_text().count("start ") == 4
    tasks.app.close()
