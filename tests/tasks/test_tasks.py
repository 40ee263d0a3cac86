"""`queen.tasks` with real workers: results, retries, timeouts, chains, unique jobs, cron, crashes and stops."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import traceback
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from queen import Queen
from queen.tasks import App, JobFailed, Worker
from queen.tasks.command import AppNotFound, load_app
from queen.tasks.task import get_turn
from tests.client.conftest import proxy_to, url_of
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.proxy import TcpProxy


class Shop:
    """The tests' side of the application, and how to start workers of it."""

    def __init__(self, module: Any, directory: Path, queen: Queen) -> None:
        self.module = module
        self.directory = directory
        self.queen = queen
        self.namespace: str = module.app.namespace

    def lines(self) -> list[str]:
        journal = self.directory / "journal"
        return journal.read_text().splitlines() if journal.exists() else []

    async def counts(self, task: Any) -> Any:
        return await self.queen.topic(self.namespace, task.topic).counts()

    def _start(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "queen.tasks", "tests.tasks.shop:app", *arguments]
        with (self.directory / "worker.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    @asynccontextmanager
    async def worker(self, *arguments: str) -> AsyncIterator[subprocess.Popen[bytes]]:
        process = self._start(arguments)
        try:
            yield process
        finally:
            process.terminate()
            # The server is in this process, and a worker says goodbye to it.
            await asyncio.to_thread(process.wait)


@pytest.fixture
async def wire(api: Api) -> AsyncIterator[TcpProxy]:
    """The way of the application to its server."""
    async with proxy_to(api) as proxy:
        yield proxy


@pytest.fixture
async def shop(api: Api, wire: TcpProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shop]:
    monkeypatch.setenv("QUEEN_TEST_URL", url_of(wire))
    monkeypatch.setenv("QUEEN_TEST_NAMESPACE", f"shop-{uuid.uuid4().hex[:8]}")
    monkeypatch.setenv("QUEEN_TEST_JOURNAL", str(tmp_path / "journal"))
    sys.modules.pop("tests.tasks.shop", None)
    module = importlib.import_module("tests.tasks.shop")
    async with Queen(api.url) as queen:
        yield Shop(module, tmp_path, queen)
    await module.app.close()


async def test_jobs_run_and_return_results(shop: Shop) -> None:
    module = shop.module
    async with shop.worker("--queue", "math", "--queue", "flaky") as process:
        assert await (await module.add.defer(2, 3)).result(60) == 5
        assert await (await module.multiply.defer(left=2, right=3)).result() == 6
        chained = module.add.s(1, 2).then(module.multiply.step(10)).then(module.add.step(4))
        assert await (await chained.defer()).result() == 34
        later = await module.add.options(at=datetime.now(UTC) + timedelta(seconds=0.1)).defer(1, 1)
        assert await later.result() == 2

        assert await (await module.fail.defer(2)).result() == 3
        failed = await module.fail.defer(9)
        with pytest.raises(JobFailed, match="RuntimeError: attempt 3"):
            await failed.result()
        assert await failed.status() == "failed"
        with pytest.raises(JobFailed, match=r"TimeoutError: took longer than its timeout of 0\.05 s"):
            await (await module.endless.defer()).result()
        await until(lambda: _dead(shop, module.fail, 1))

        process.send_signal(signal.SIGTERM)
        assert await _ended(process) == 0


async def _dead(shop: Shop, task: Any, count: int) -> bool:
    return bool((await shop.counts(task))["dead"] == count)


async def _ended(process: subprocess.Popen[bytes]) -> int:
    async def ended() -> bool:
        return process.poll() is not None

    await until(ended)
    assert process.returncode is not None
    return int(process.returncode)


async def test_jobs_wait_for_their_time_their_priority_and_are_unique(shop: Shop) -> None:
    add = shop.module.add
    await add.options(delay=3600).defer(0, 0)
    await add.options(priority=5).defer(2, 2)
    await add.options(priority=-5).defer(1, 1)
    first = await add.options(unique="order-1").defer(3, 3)
    second = await add.options(unique="order-1").defer(3, 3)
    assert first.id == second.id
    assert await first.status() == "waiting"
    topic = shop.queen.topic(shop.namespace, add.topic)
    counts = await topic.counts()
    assert counts is not None
    assert (counts["delayed"], counts["ready"]) == (1, 3)
    assert [item["data"]["args"] for item in await topic.peek()] == [[1, 1], [3, 3], [2, 2]]
    with pytest.raises(TimeoutError, match=r"is not done after 0\.01 s"):
        await first.result(0.01)


async def test_kill_loses_no_job_and_a_stopped_worker_finishes_its_jobs(shop: Shop) -> None:
    hold, gate = shop.module.hold, shop.directory / "gate"
    async with shop.worker("--queue", "slow", "--concurrency", "1") as first:
        for name in ("one", "two"):
            await hold.options(priority=int(name == "two")).defer(name, str(gate))
        await until(lambda: _noted(shop, "start one"))
        first.kill()
        first.wait()
    # The lease of the dead worker is what the other waits for; the test does not.
    items = await shop.queen.topic(shop.namespace, hold.topic).peek(leased=True)
    assert [item["data"]["args"][0] for item in items] == ["one"]
    await shop.queen.topic(shop.namespace, hold.topic).release(items)
    async with shop.worker("--queue", "slow", "--concurrency", "1") as second:
        await until(lambda: _count(shop, "start one", 2))
        second.send_signal(signal.SIGTERM)
        gate.touch()
        assert await _ended(second) == 0
    assert shop.lines() == ["start one", "start one", "end one"]
    counts = await shop.counts(hold)
    assert (counts["ready"], counts["leased"], counts["dead"]) == (1, 0, 0)


async def _noted(shop: Shop, line: str) -> bool:
    return line in shop.lines()


async def _count(shop: Shop, line: str, count: int) -> bool:
    return shop.lines().count(line) == count


async def test_a_schedule_defers_each_tick_once_with_several_workers(shop: Shop) -> None:
    topic = shop.queen.topic(shop.namespace, shop.module.tick.topic)
    async with shop.worker("--queue", "clock", "--processes", "2"):

        async def both_have_scheduled() -> bool:
            log = (shop.directory / "worker.log").read_text()
            counts = await topic.counts()
            return log.count("is ready") == 2 and counts is not None and counts["delayed"] + counts["leased"] > 0

        await until(both_have_scheduled)
        items = await topic.peek(100, delayed=True)
    times = [item["deliver_after"] for item in items]
    assert len(times) == len(set(times))
    assert all(item["data"]["args"] == ["tick"] for item in items)


async def test_a_process_that_dies_is_replaced_and_all_stop_when_their_parent_is_gone(shop: Shop) -> None:
    async with shop.worker("--queue", "math", "--processes", "2") as parent:
        await until(lambda: _logged(shop, "is ready", 2))
        first = psutil.Process(parent.pid).children()
        first[0].kill()
        await until(lambda: _logged(shop, "is ready", 3))
        now = psutil.Process(parent.pid).children()
        assert len(now) == 2 and first[0] not in now and first[1] in now
        parent.kill()
        await until(lambda: _logged(shop, "worker has stopped", 2))
        await until(lambda: not any(map(_runs, now)))


async def _logged(shop: Shop, text: str, count: int) -> bool:
    return (shop.directory / "worker.log").read_text().count(text) == count


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_is_declared_wrongly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = App()

    @app.task(queue="mail")
    async def send() -> None: ...

    with pytest.raises(ValueError, match="there is a task 'send' already"):
        app.task(name="send")(lambda: None)
    with pytest.raises(ValueError, match="task blocking has a timeout, and has to be an `async def`"):

        @app.task(timeout=1)
        def blocking() -> None: ...

    with pytest.raises(ValueError, match="no task has the queue mial; queues are mail"):
        Worker(app, queues=["mial"])
    with pytest.raises(ValueError, match="the application has no tasks"):
        Worker(App())
    with pytest.raises(LookupError, match="there is no task 'sned': did you mean 'send'"):
        app.find("sned")
    with pytest.raises(TypeError, match=r"@app\.cron goes above @app\.task"):
        function: Any = send.function
        app.cron("* * * * *")(function)
    with pytest.raises(ValueError, match=r"'61 \* \* \* \*' is not a cron expression like"):
        app.cron("61 * * * *")
    with pytest.raises(ValueError, match="'Mars/Base' is not a time zone"):
        app.cron("* * * * *", timezone="Mars/Base")
    with pytest.raises(TypeError, match="task send: too many positional arguments"):
        app.cron("* * * * *", "no such argument")(send)
    with pytest.raises(ValueError, match="concurrency must be at least 1, not 0"):
        Worker(app, concurrency=0)
    with pytest.raises(ValueError, match="delay and at exclude each other"):
        send.options(delay=1, at=datetime.now(UTC))

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mailing_app.py").write_text("from queen.tasks import App\nmail = App()\n")
    with pytest.raises(AppNotFound, match="has no App called 'app'; it has mailing_app:mail"):
        load_app("mailing_app")
    with pytest.raises(AppNotFound, match="there is no module 'no_such_module'"):
        load_app("no_such_module:app")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no_such_module:app"], "there is no module 'no_such_module'"),
        (["mailing:app", "--queue", "mial"], "no task has the queue mial; queues are mail"),
        (["mailing:empty"], "the application has no tasks"),
    ],
)
@pytest.mark.parametrize("program", [["-c", "from queen.cli import main; main()", "worker"], ["-m", "queen.tasks"]])
def test_the_command_says_what_is_wrong(
    tmp_path: Path, program: Sequence[str], arguments: Sequence[str], text: str
) -> None:
    (tmp_path / "mailing.py").write_text(
        "from queen.tasks import App\napp, empty = App(), App()\napp.task(queue='mail')(print)\n"
    )
    command = [sys.executable, *program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ, check=False)
    assert done.returncode == 1
    assert text in done.stderr and done.stderr.count("\n") == 1, done.stderr


async def test_jobs_are_deferred_from_programs_without_an_event_loop(shop: Shop) -> None:
    job = await asyncio.to_thread(shop.module.add.defer_sync, 1, 2)
    unique = await asyncio.to_thread(shop.module.add.options(unique="x").defer_sync, 3, 4)
    assert await asyncio.to_thread(job.status_sync) == "waiting"
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(job.result_sync, 0.01)
    async with _running(shop, "math"):
        assert await asyncio.to_thread(job.result_sync) == 3
        assert await asyncio.to_thread(unique.result_sync) == 7
        assert await shop.module.app.job(job.id).result() == 3


@asynccontextmanager
async def _running(shop: Shop, *queues: str, **options: Any) -> AsyncIterator[asyncio.Event]:
    """A worker in this process."""
    stop = asyncio.Event()
    running = asyncio.create_task(Worker(shop.module.app, queues=queues, **options).run(stop))
    try:
        yield stop
    finally:
        stop.set()
        await running


async def test_a_unique_key_is_free_when_its_job_has_ended(shop: Shop) -> None:
    add = shop.module.add.options(unique="order-1")
    first, second = await add.defer(1, 1), await add.defer(9, 9)
    assert first.id == second.id
    chain = add.s(1, 2).then(shop.module.multiply.step(10))
    assert (await chain.defer()).id == f"{first.id}.then"
    async with _running(shop, "math", "flaky"):
        assert await second.result() == 2
        third = await add.defer(2, 2)
        assert third.id != first.id
        assert await third.result() == 4
        multiplied = shop.module.add.options(unique="chain").s(1, 2).then(shop.module.multiply.step(10))
        assert await (await multiplied.defer()).result() == 30
        failing = shop.module.odd.options(unique="odd")
        for _ in range(2):
            with pytest.raises(JobFailed, match="the result of a task has to be JSON"):
                await (await failing.defer()).result()


async def test_the_log_says_where_a_job_has_failed(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    async with _running(shop, "flaky"):
        assert await (await shop.module.fail.defer(1)).result() == 2
    (failed,) = [record for record in caplog.records if "of task fail failed: RuntimeError" in record.getMessage()]
    assert failed.exc_info is not None
    (*_, frame) = traceback.extract_tb(failed.exc_info[2])
    assert (frame.name, frame.line) == ("fail", 'raise RuntimeError(f"attempt {attempt}")')


def test_a_task_without_options_needs_no_parentheses() -> None:
    app = App()

    @app.cron("0 4 * * *", 5)
    @app.task
    async def bake(minutes: int) -> str:
        return f"{minutes} minutes"

    assert app.find("bake") is bake
    assert bake.settings == app.task(name="other")(bake.function).settings


async def test_a_failed_step_fails_the_chain(shop: Shop) -> None:
    async with _running(shop, "math", "flaky"):
        chain = shop.module.odd.s().then(shop.module.multiply.step(2)).then(shop.module.multiply.step(2))
        with pytest.raises(JobFailed, match="has to be JSON"):
            await (await chain.defer()).result()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("large", "may have 1048476 bytes as JSON, not 1100002"),
        ("surrogate", "has to be JSON: 'utf-8' codec"),
        ("large error", "RuntimeError: xxx"),
        ("surrogate error", r"RuntimeError: caf\\udce9"),
    ],
)
async def test_what_cannot_be_stored_fails_its_job_alone(shop: Shop, kind: str, text: str) -> None:
    give = shop.module.give
    async with _running(shop, "math", "flaky"):
        failed = await give.options(unique="once").defer(kind)
        with pytest.raises(JobFailed, match=text):
            await failed.result()
        again = await give.options(unique="once").defer(kind)
        assert again.id != failed.id
        # One that ends while it is being deferred may not have been meant: then another follows it.
        with pytest.raises(JobFailed, match=text):
            await again.result()
        assert await (await shop.module.add.defer(1, 1)).result() == 2


async def test_a_task_cannot_end_its_worker(shop: Shop) -> None:
    module = shop.module
    async with _running(shop, "math", "flaky"):
        for call, text in (
            (module.leave.s("exit"), r"the task called sys\.exit\(7\)"),
            (module.leave.s("cancelled"), "something that the task waited for was cancelled"),
            (module.leave.s("interrupted"), "the task raised KeyboardInterrupt"),
            (module.leave_thread.s(), r"the task called sys\.exit\(7\)"),
        ):
            with pytest.raises(JobFailed, match=text):
                await (await call.defer()).result()
        assert await (await module.add.defer(1, 1)).result() == 2


async def test_a_job_whose_worker_dies_runs_again_also_without_retries(shop: Shop) -> None:
    give = shop.module.give
    job = await give.defer("fine")
    await _lose(shop, give, 1)
    async with _running(shop, "flaky"):
        assert await job.result() == "done"


async def test_a_job_whose_workers_die_again_and_again_fails(shop: Shop) -> None:
    give = shop.module.give
    job = await give.options(unique="once").s("fine").then(shop.module.add.step(1)).defer()
    await _lose(shop, give, 3)
    async with _running(shop, "math", "flaky"):
        with pytest.raises(JobFailed, match=r"the worker of attempt 3 died, or could not reach the server"):
            await job.result(100)
        again = await give.options(unique="once").defer("fine")
        assert again.id != job.id.removesuffix(".then")
        assert await again.result() == "done"
    (letter,) = await shop.queen.topic(shop.namespace, give.topic).dlq().get()
    assert str(letter["last_error"]).startswith("the worker of attempt 3 died")


async def _lose(shop: Shop, task: Any, times: int) -> None:
    """Lease the job of a task, as a worker that dies then."""
    for _ in range(times):
        assert len(await shop.queen.topic(shop.namespace, task.topic).lease(0.1).dequeue()) == 1


async def test_a_job_that_ends_twice_frees_its_key_once(shop: Shop) -> None:
    wait = shop.module.wait.options(unique="order-1")
    job = await wait.defer("first")
    async with _running(shop, "slow"):
        await until(lambda: _noted(shop, "start first"))
        # Its lease ends early, as by an outage, and it is run once more.
        (item,) = await shop.queen.topic(shop.namespace, shop.module.wait.topic).peek(leased=True)
        await shop.queen.topic(shop.namespace, shop.module.wait.topic).release(item)
        await until(lambda: _count(shop, "start first", 2))
        shop.module.gate.set()
        await job.result(100)
        await until(lambda: _settled(shop, shop.module.wait))
    (turn,) = await shop.module.app.connection.run_kv(get_turn("wait:order-1"))
    assert turn["value"] == 1


async def _settled(shop: Shop, task: Any) -> bool:
    counts = await shop.counts(task)
    return bool(counts["ready"] == counts["leased"] == 0)


async def test_a_worker_waits_for_a_server_that_starts_later(
    shop: Shop, wire: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    job = await shop.module.add.defer(1, 1)
    async with AsyncExitStack() as stack:
        async with wire.away():
            await stack.enter_async_context(_running(shop, "math"))
            await until(lambda: "the worker waits for the server" in caplog.text)
        assert await job.result(100) == 2


async def test_an_outcome_waits_for_the_server_to_return(
    shop: Shop, wire: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    wait = shop.module.wait
    async with _running(shop, "slow"):
        job = await wait.options(unique="held").defer("held")
        await until(lambda: _noted(shop, "start held"))
        waiting = asyncio.create_task(job.result(100))
        async with wire.away():
            shop.module.gate.set()
            await until(lambda: "outcome of a job cannot be stored" in caplog.text)
        assert await waiting is None
        assert (await wait.options(unique="held").defer("next")).id != job.id
        await until(lambda: _noted(shop, "start next"))
    assert shop.lines() == ["start held", "start next"]
    counts = await shop.counts(wait)
    assert (counts["ready"], counts["leased"], counts["delayed"], counts["dead"]) == (0, 0, 0, 0)


async def test_many_calls_are_deferred_in_one_request(shop: Shop) -> None:
    add, multiply = shop.module.add, shop.module.multiply
    jobs = await shop.module.app.defer_many([add.s(1, 1), multiply.options(priority=-1).s(2, 3)])
    assert await shop.module.app.defer_many([]) == []
    async with _running(shop, "math"):
        assert [await job.result() for job in jobs] == [2, 6]
    with pytest.raises(ValueError, match="unique jobs are deferred one by one"):
        await shop.module.app.defer_many([add.options(unique="x").s(1, 1)])


async def test_arguments_that_do_not_fit_are_refused_when_they_are_deferred(shop: Shop) -> None:
    with pytest.raises(TypeError, match="task add: missing a required argument: 'right'"):
        await shop.module.add.defer(1)
    with pytest.raises(TypeError, match="task multiply: too many positional arguments"):
        await shop.module.add.s(1, 1).then(shop.module.multiply.step(1, 2)).defer()


async def test_jobs_that_outlast_a_stop_are_released(shop: Shop) -> None:
    hold = shop.module.wait
    async with _running(shop, "slow", stop_timeout=0.0) as stop:
        await hold.defer("long")
        await until(lambda: _noted(shop, "start long"))
        stop.set()
    counts = await shop.counts(hold)
    assert (counts["ready"], counts["leased"], counts["dead"]) == (1, 0, 0)
    (item,) = await shop.queen.topic(shop.namespace, hold.topic).peek()
    assert item["retries"] == 0


async def test_workers_share_what_the_lifespan_opens(shop: Shop) -> None:
    opened: list[str] = []

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        opened.append("open")
        yield
        opened.append("closed")

    shop.module.app.lifespan = lifespan
    async with _running(shop, "math"):
        assert await (await shop.module.add.defer(1, 1)).result() == 2
        assert opened == ["open"]
    assert opened == ["open", "closed"]


async def test_the_server_shows_applications_their_tasks_and_workers(shop: Shop) -> None:
    async def seen() -> Any:
        answer = await shop.queen.request("GET", f"/api/v1/tasks?namespace={shop.namespace}")
        return answer["applications"][0] if answer["applications"] else None

    async def task(name: str) -> Any:
        application = await seen()
        return next(one for one in application["tasks"] if one["task"] == name) if application else None

    assert await seen() is None
    async with _running(shop, "math", "slow", "flaky"):
        await shop.module.wait.defer("shown")
        await (await shop.module.add.defer(1, 1)).result()
        await shop.module.odd.defer()
        await until(lambda: _noted(shop, "start shown"))
        await shop.module.add.options(delay=3600).defer(1, 1)

        async def is_reported() -> bool:
            one, waiting = await task("add"), await task("wait")
            return bool(one and one["done"] == 1 and waiting["running"] == 1 and (await task("odd"))["failed"] == 1)

        await until(is_reported)
        application = await seen()
        (worker,) = application["workers"]
        assert (worker["pid"], worker["queues"]) == (os.getpid(), ["flaky", "math", "slow"])
        assert [job["task"] for job in worker["running"]] == ["wait"]
        assert [(one["task"], one["final"]) for one in worker["failures"]] == [("odd", True)]
        add = await task("add")
        assert (add["workers"], add["delayed"], add["topic"]) == (1, 1, "math/add")
        assert add["meanSeconds"] >= 0
        assert (await task("tick"))["workers"] == 0
        assert application["schedules"] == [{"task": "tick", "expression": "* * * * *", "timezone": "UTC"}]
        shop.module.gate.set()
    # One that has stopped is not alive; its application stays.
    assert (await seen())["workers"] == []
    everything = await shop.queen.request("GET", "/api/v1/tasks")
    assert shop.namespace in [one["namespace"] for one in everything["applications"]]
