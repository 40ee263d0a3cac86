"""What the server logs: one JSON object per line when asked to, and never what it carries."""

from __future__ import annotations

import json
import logging
import signal
import sys
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from queen.cli.serve.supervisor import PostgresLog
from queen.http.api.messages import messaging
from tests.cli.serve.test_serve import queen, started
from tests.conftest import StartServer
from tests.support.api import Api
from tests.support.ports import free_port
from tests.support.proxy import Proxy

# Logs what is hard to put in a line, then dies in a thread and of an error that nobody caught.
TROUBLED = """
import logging, sys, threading, warnings
from queen.cli.serve.logs import configure_logging

configure_logging("trace", sys.argv[1], "worker 3", 3)
log = logging.getLogger("queen.test")
log.info('two\\nlines, "quotes" and \\udcff \\x1b[31m', extra={"fields": {"status": 7}})
try:
    raise ValueError("first")
except ValueError:
    log.exception("failed")
warnings.warn("careful")
thread = threading.Thread(target=lambda: 1 / 0, name="helper")
thread.start()
thread.join()
raise LookupError("last words")
"""


async def test_every_line_is_an_object_also_when_things_go_wrong() -> None:
    async with started(sys.executable, "-c", TROUBLED, "json") as process:
        assert await process.ended() == 1
    lines = [json.loads(line) for line in process.lines if line]
    for line in lines:
        assert {"time", "level", "logger", "message", "process", "worker", "pid"} <= line.keys()
        assert (line["process"], line["worker"], line["pid"]) == ("worker 3", 3, process.process.pid)
    told, failed, careful, thread, last = lines
    assert (told["message"], told["level"], told["status"]) == (
        'two\nlines, "quotes" and \\udcff \x1b[31m',
        "info",
        7,
    )
    assert (failed["level"], "ValueError: first" in failed["exception"]) == ("error", True)
    assert (careful["level"], "careful" in careful["message"]) == ("warn", True)
    assert "helper" in thread["message"] and "ZeroDivisionError" in thread["exception"]
    assert (last["level"], "LookupError: last words" in last["exception"]) == ("critical", True)


async def test_text_lines_have_the_process_and_the_level() -> None:
    async with started(sys.executable, "-c", TROUBLED, "text") as process:
        assert await process.ended() == 1
    # What a client sends cannot pretend to be another line, or command a terminal.
    assert process.lines[0].endswith(r'INFO  worker 3: two\nlines, "quotes" and \udcff \x1b[31m')
    assert any(line.endswith("ERROR worker 3: failed") for line in process.lines)
    assert "LookupError: last words" in process.lines


async def test_supervisor_workers_and_postgres_log_objects_and_never_payloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    for variable, value in (("LOG_ENCODING", "json"), ("LOG_LEVEL", "debug"), ("LOG_SLOW_MS", "1")):
        monkeypatch.setenv(variable, value)
    options = ("--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--data-dir", str(tmp_path))
    async with started(*queen("serve", *options)) as served:
        await served.line_with("is ready at")
        item = {"queue": "orders", "transactionId": "hush-id", "payload": {"card": "hush-hush"}}
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer hush-token"}) as session:
            url = f"http://127.0.0.1:{port}/api/v1"
            async with session.post(f"{url}/push", json={"items": [item]}) as answer:
                assert answer.status == 201
            async with session.post(f"{url}/push?token=hush-query", json={"items": [item]}) as answer:
                assert answer.status == 400
        slow = json.loads(await served.line_with("slow request: POST /api/v1/push"))
        served.process.send_signal(signal.SIGTERM)
        assert await served.ended() == 0
    assert "hush" not in "\n".join(served.lines)
    assert (slow["worker"], slow["method"], slow["path"], slow["status"]) == (0, "POST", "/api/v1/push", 201)
    assert slow["duration_ms"] >= 1
    loggers = {json.loads(line)["logger"] for line in served.lines if line}
    assert {"queen", "queen.supervisor", "queen.http.server.observe"} <= loggers


async def test_a_password_is_not_logged_when_the_database_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOG_ENCODING", "json")
    monkeypatch.setenv("LOG_LEVEL", "trace")
    url = f"postgresql://somebody:hush@127.0.0.1:{free_port()}/database"
    options = ("--host", "127.0.0.1", "--port", str(free_port()), "--database-url", url)
    async with started(*queen("serve", *options)) as served:
        waiting = json.loads(await served.line_with("waiting for PostgreSQL"))
        served.process.send_signal(signal.SIGTERM)
        await served.ended()
    assert (waiting["logger"], waiting["level"], waiting["worker"]) == ("queen.supervisor", "warn", None)
    assert "hush" not in "\n".join(served.lines)


async def test_a_server_that_cannot_start_says_so_in_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_ENCODING", "json")
    async with started(*queen("serve", "--host", "nowhere.invalid", "--port", str(free_port()))) as served:
        assert await served.ended() == 1
    *_, line = (json.loads(line) for line in served.lines if line)
    assert (line["level"], "nowhere.invalid is not a valid address" in line["message"]) == ("critical", True)


async def test_a_slow_request_is_logged_and_a_pop_that_waits_is_not(
    start_server: StartServer, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    api = await start_server(database_urls=(proxy.dsn,), log_slow_ms=40)
    await api.push("orders", 1)
    caplog.clear()
    proxy.delay = 0.05
    await api.push("orders", 2)
    await api.call("GET", "/livez")
    await api.pop("nothing", wait=True, timeout=100)
    answer = await api.call("POST", "/api/v1/push", data=b"{")
    assert answer.status == 400
    found = [record.getMessage() for record in caplog.records if record.name == "queen.http.server.observe"]
    assert len(found) == 1, found
    assert found[0].startswith("slow request: POST /api/v1/push took ")
    assert found[0].endswith("ms and was answered 201")


async def test_a_slow_failure_is_logged_with_its_status(
    start_server: StartServer, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    api = await start_server(database_urls=(proxy.dsn,), log_slow_ms=40)
    proxy.delay = 0.05
    assert (await api.call("GET", "/api/v1/resources/queues/unknown")).status == 404
    found = [record.getMessage() for record in caplog.records if record.name == "queen.http.server.observe"]
    assert found[0].endswith("answered 404")


async def test_without_the_setting_requests_are_served_by_the_handlers_themselves(api: Api) -> None:
    assert api.worker is not None
    handlers = {route.pattern: route.handler for route in api.worker.http.router.routes}
    handler = handlers["/api/v1/ack/batch"]
    assert isinstance(handler, partial)
    assert handler.func is messaging.ack_batch


def test_the_log_of_postgres_is_passed_on_without_errors_of_statements(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "postgres.log"
    path.write_text("2026-01-01 10:00:00.000 UTC [1] WARNING:  from before\n")
    log = PostgresLog(path)
    with path.open("a") as file:
        file.write("2026-01-01 10:00:01.000 UTC [7] WARNING:  worker took too long\n")
        file.write('2026-01-01 10:00:02.000 UTC [7] ERROR:  invalid input: "a payload"\n\tnot a line of ours\n')
        file.write("2026-01-01 10:00:03.000 UTC [7] FATAL:  terminating conn")
    log.relay()
    with path.open("a") as file:
        file.write("ection\n2026-01-01 10:00:04.000 UTC [1] LOG:  checkpoint starting\n")
    log.relay()
    path.write_text("2026-01-01 10:00:05.000 UTC [1] PANIC:  no space\n")
    log.relay()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "PostgreSQL: worker took too long"),
        ("WARNING", "PostgreSQL: terminating connection"),
        ("DEBUG", "PostgreSQL: checkpoint starting"),
        ("ERROR", "PostgreSQL: no space"),
    ]
