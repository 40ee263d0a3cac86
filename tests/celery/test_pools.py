"""Workers of green threads, where gevent and eventlet are installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from celery import chord

from tests.celery.queues import Namespace
from tests.celery.worker import celery_worker, load_tasks
from tests.support.ageing import block_until


@pytest.mark.soak
@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_a_worker_of_green_threads_runs_tasks(
    pool: str, namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Found and not imported: eventlet changes the process that imports it.
    if importlib.util.find_spec(pool) is None:
        pytest.skip(f"{pool} is not installed")
    tasks = load_tasks(namespace.url, tmp_path, monkeypatch)
    gate = tmp_path / "gate"
    with celery_worker(namespace.url, tmp_path, pool, "-P", pool, "-c", "4", lease=2) as worker:
        held = [tasks.hold.delay(str(number), str(gate)) for number in range(4)]
        journal = tmp_path / "journal"
        block_until(lambda: journal.exists() and journal.read_text().count("start ") == 4, "all four to run at once")
        # Their leases are renewed while they wait, and nobody else gets them.
        assert tasks.app.control.ping(timeout=100, limit=1) == [{f"{pool}@test": {"ok": "pong"}}]
        gate.touch()
        assert [result.get(timeout=60) for result in held] == ["0", "1", "2", "3"]
        assert chord((tasks.add.s(i, i) for i in range(3)), tasks.total.s())().get(timeout=60) == 6
        block_until(lambda: namespace.counts("celery")["leased"] == 0, "the last ack")
        worker.stop()
    assert journal.read_text().count("start ") == 4
    tasks.app.close()
