"""A real Celery worker on Queen: tasks, results, canvas, remote control, events."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from tests.celery.queues import Namespace
from tests.celery.worker import celery_worker, load_tasks
from tests.support.ageing import block_until
from tests.support.host import Host

_SECONDS = 100


class Application:
    """The tests' side of the application: its tasks, its namespace, its journal."""

    def __init__(self, tasks: Any, namespace: Namespace, directory: Path) -> None:
        self.tasks = tasks
        self.app = tasks.app
        self.namespace = namespace
        self.directory = directory

    def lines(self) -> list[str]:
        journal = self.directory / "journal"
        return journal.read_text().splitlines() if journal.exists() else []


@pytest.fixture(scope="module")
def application(celery_host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """The application with a worker of two processes."""
    directory = tmp_path_factory.mktemp("worker")
    with (
        Namespace(celery_host.port, f"worker-{uuid.uuid4().hex[:12]}") as namespace,
        pytest.MonkeyPatch.context() as env,
    ):
        tasks = load_tasks(namespace.url, directory, env)
        with celery_worker(namespace.url, directory, "main", "-c", "2") as _:
            yield Application(tasks, namespace, directory)
        tasks.app.close()


def test_a_task_returns_its_result(application: Application) -> None:
    result = application.tasks.add.delay(2, 3)
    assert result.get(timeout=_SECONDS) == 5
    assert application.app.AsyncResult(result.id).state == "SUCCESS"


def test_arguments_and_results_may_have_lone_surrogates(application: Application) -> None:
    assert application.tasks.joined.delay(["caf\udce9", "żółw"]).get(timeout=_SECONDS) == "caf\udce9 żółw"


def test_a_failed_task_raises_its_error(application: Application) -> None:
    with pytest.raises(TypeError):
        application.tasks.add.delay(2, "3").get(timeout=_SECONDS)


def test_a_task_is_retried(application: Application) -> None:
    assert application.tasks.flaky.delay(2).get(timeout=_SECONDS) == 2


def test_a_countdown_is_held_by_the_server_and_not_by_the_worker(application: Application) -> None:
    result = application.tasks.add.apply_async((1, 1), countdown=3600, queue="celery")
    block_until(lambda: application.namespace.counts("celery")["delayed"] == 1, "the delayed item")
    assert application.app.control.inspect(timeout=100, limit=1).scheduled() == {"main@test": []}
    result.revoke()
    application.namespace.queen.topic(application.namespace.name, "celery").purge()


def test_a_task_that_is_due_soon_runs(application: Application) -> None:
    assert application.tasks.add.apply_async((1, 2), countdown=0.1).get(timeout=_SECONDS) == 3


def test_chains_groups_and_chords(application: Application) -> None:
    add, total = application.tasks.add, application.tasks.total
    assert chain(add.s(1, 2), add.s(3), add.s(4))().get(timeout=_SECONDS) == 10
    assert group(add.s(i, i) for i in range(5))().get(timeout=_SECONDS) == [0, 2, 4, 6, 8]
    assert chord((add.s(i, i) for i in range(10)), total.s())().get(timeout=_SECONDS) == 90


def test_a_chord_waits_for_the_groups_inside_its_header(application: Application) -> None:
    add = application.tasks.add
    inner = chain(add.si(1, 200), group(add.si(1, 1000), add.si(1, 2000)))
    nested = chain(add.si(1, 0), group(add.si(1, 100), inner), add.si(1, 10))
    assert nested().get(timeout=_SECONDS) == 11


def test_the_body_of_a_chord_gets_the_results_of_tasks_that_its_header_has_added(application: Application) -> None:
    add, total, adding = application.tasks.add, application.tasks.total, application.tasks.add_each_to_chord
    result = chord([add.s(1, 1), adding.s([1, 2, 3], 10)], total.s())()
    assert result.get(timeout=_SECONDS) == 2 + 11 + 12 + 13


def test_a_failed_part_fails_the_chord(application: Application) -> None:
    add, total = application.tasks.add, application.tasks.total
    result = chord([add.s(1, 1), add.s(1, "x")], total.s())()
    with pytest.raises(Exception, match="unsupported operand"):
        result.get(timeout=_SECONDS)


def test_a_group_whose_predecessor_failed_fails(application: Application) -> None:
    add = application.tasks.add
    result = (add.s(1, "x") | group(add.s(1), add.s(2))).delay()
    with pytest.raises(TypeError):
        result.get(timeout=_SECONDS)


def test_a_revoked_task_does_not_run(application: Application) -> None:
    identity = uuid.uuid4().hex
    application.app.control.revoke(identity, reply=True, timeout=100, limit=1)
    result = application.tasks.journal.apply_async(("revoked",), task_id=identity)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=_SECONDS)
    assert "revoked" not in application.lines()


def test_a_running_task_is_seen_and_terminated(application: Application) -> None:
    result = application.tasks.hold.delay("endless", str(application.directory / "never"))
    block_until(lambda: "start endless" in application.lines(), "the task to start")
    inspect = application.app.control.inspect(timeout=100, limit=1)
    assert [task["id"] for task in inspect.active()["main@test"]] == [result.id]
    application.app.control.revoke(result.id, terminate=True, signal="SIGKILL", reply=True, timeout=100, limit=1)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=_SECONDS)


def test_remote_control_answers(application: Application) -> None:
    control = application.app.control
    assert control.ping(timeout=100, limit=1) == [{"main@test": {"ok": "pong"}}]
    assert "tests.celery.tasks.add" in control.inspect(timeout=100, limit=1).registered()["main@test"]
    assert control.inspect(timeout=100, limit=1).stats()["main@test"]["broker"]["transport"] == "queen"
    (limited,) = control.rate_limit("tests.celery.tasks.add", "100/s", reply=True, timeout=100, limit=1)
    assert limited == {"main@test": {"ok": "new rate limit set successfully"}}
    assert application.tasks.add.delay(1, 1).get(timeout=_SECONDS) == 2
    control.rate_limit("tests.celery.tasks.add", 0, reply=True, timeout=100, limit=1)


def test_a_worker_starts_and_stops_consuming_a_queue_by_remote_control(application: Application) -> None:
    control = application.app.control
    result = application.tasks.add.apply_async((4, 4), queue="extra")
    control.add_consumer("extra", reply=True, timeout=100, limit=1)
    assert result.get(timeout=_SECONDS) == 8
    control.cancel_consumer("extra", reply=True, timeout=100, limit=1)
    application.tasks.add.apply_async((5, 5), queue="extra")
    assert application.tasks.add.delay(1, 1).get(timeout=_SECONDS) == 2
    block_until(lambda: application.namespace.counts("extra")["ready"] == 1, "the item that nobody consumes")


def test_events_of_a_task_are_received(application: Application) -> None:
    heard: list[dict[str, Any]] = []
    listening = threading.Event()
    done = threading.Event()
    identity = uuid.uuid4().hex

    def listen() -> None:
        def on_event(event: dict[str, Any]) -> None:
            if event.get("uuid") == identity:
                heard.append(event)
            if event["type"] == "task-succeeded" and event["uuid"] == identity:
                done.set()

        with application.app.connection_for_read() as connection:
            receiver = application.app.events.Receiver(connection, handlers={"*": on_event})
            with receiver.consumer_context() as (consuming, _, _):
                listening.set()
                while not done.is_set():
                    consuming.drain_events(timeout=_SECONDS)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    assert listening.wait(_SECONDS)
    application.tasks.add.apply_async((1, 1), task_id=identity)
    assert done.wait(_SECONDS)
    listener.join(_SECONDS)
    assert {"task-received", "task-started", "task-succeeded"} <= {event["type"] for event in heard}


def test_urgent_tasks_overtake_others_that_wait(application: Application) -> None:
    gates = [application.directory / f"gate{number}" for number in range(2)]
    blockers = [application.tasks.hold.delay(f"blocker{number}", str(gate)) for number, gate in enumerate(gates)]
    block_until(lambda: {"start blocker0", "start blocker1"} <= set(application.lines()), "both processes to be busy")
    # One process is left to run them, one after the other; both may have reserved one task more.
    results = [application.tasks.journal.apply_async((f"p{priority}",), priority=priority) for priority in (0, 5, 9)]
    gates[0].touch()
    for result in results:
        result.get(timeout=_SECONDS)
    gates[1].touch()
    for blocker in blockers:
        blocker.get(timeout=_SECONDS)
    order = [line for line in application.lines() if line.startswith("p")]
    assert order.index("p9") < order.index("p5")


def test_a_rejected_task_goes_back_to_its_queue(application: Application) -> None:
    assert application.tasks.rejected_once.delay().get(timeout=_SECONDS) == "done"


def test_a_result_expires_and_can_be_forgotten(application: Application) -> None:
    result = application.tasks.add.delay(1, 1)
    assert result.get(timeout=_SECONDS) == 2
    result.forget()
    assert application.app.AsyncResult(result.id).state == "PENDING"
    backend = type(application.app.backend)(application.app, url=application.namespace.url, expires=1)
    backend.store_result("short", 1, "SUCCESS")
    assert AsyncResult("short", backend=backend, app=application.app).state == "SUCCESS"
    fresh = type(application.app.backend)(application.app, url=application.namespace.url)
    block_until(lambda: fresh._get_task_meta_for("short")["status"] == "PENDING", "the result to expire")
