"""The client without `await`."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from queen import LeaseLostError, Message, QueenSync, UnsentError
from tests.api import Api


async def in_thread(work: Any) -> None:
    """The server of the test runs in this thread's event loop, so the one that waits is another."""
    await asyncio.to_thread(work)


async def test_grammar_is_the_same_without_await(api: Api) -> None:
    def script() -> None:
        with QueenSync(api.url) as queen:
            assert queen.queue("q").config({"retryLimit": 0}).create()["configured"] is True
            results = queen.queue("q").partition("p").push([{"data": n} for n in range(3)])
            assert [result["status"] for result in results] == ["queued"] * 3
            first, second, third = queen.queue("q").partition("p").batch(3).pop()
            assert [first["data"], second["data"], third["data"]] == [0, 1, 2]
            assert queen.renew(first)["success"] is True
            assert queen.ack(first)["success"] is True
            queen.transaction().ack(second).queue("out").partition("o").push({"data": "moved"}).commit()
            assert queen.ack([third], False, {"error": "bad"})["success"] is True
            found = queen.queue("q").dlq().limit(5).get()
            assert [letter["errorMessage"] for letter in found["messages"]] == ["bad"]
            assert queen.admin.get_queue("out")["name"] == "out"
            assert queen.request("GET", "/health")["status"] == "healthy"
            assert queen.queue("q").wait(False).pop() == []
            queen.queue("b").buffer({"message_count": 100, "time_millis": 60_000}).push({"data": 1})
            assert queen.get_buffer_stats()["totalBufferedMessages"] == 1
            queen.queue("b").flush_buffer()
            queen.queue("b").buffer({"message_count": 100, "time_millis": 60_000}).push({"data": 2})
            assert queen.delete_consumer_group("nobody")["success"] is True
            assert queen.queue("q").delete()["deleted"] is True

    await in_thread(script)
    assert [message["data"] for message in await api.pop("out", partition="o")] == ["moved"]
    assert [message["data"] for message in await api.pop("b", batch=5)] == [1, 2]


async def test_handlers_run_in_threads_and_trace_without_await(api: Api) -> None:
    got: list[Any] = []
    threads: set[int] = set()
    meeting = threading.Barrier(2, timeout=10)

    def handle(message: Message) -> None:
        threads.add(threading.get_ident())
        meeting.wait()
        traced: Any = message["trace"]({"traceName": "seen", "data": {"n": message["data"]}})
        got.append((message["data"], traced["success"]))

    def script() -> None:
        with QueenSync(api.url) as queen:
            queen.queue("q").partition("a").push({"data": 1})
            queen.queue("q").partition("b").push({"data": 2})
            queen.queue("q").concurrency(2).limit(1).consume(handle)
            assert queen.admin.get_traces_by_name("seen")["total"] == 2

    await in_thread(script)
    assert sorted(got) == [(1, True), (2, True)]
    assert len(threads) == 2 and threading.get_ident() not in threads


async def test_failing_handler_gets_its_message_again(api: Api) -> None:
    calls: list[Any] = []
    enough = threading.Event()

    def handle(message: Message) -> None:
        calls.append(message["data"])
        if len(calls) < 3:
            raise ValueError("not yet")
        enough.set()

    def script() -> None:
        with QueenSync(api.url) as queen:
            queen.queue("q").config({"retryDelay": 0}).create()
            queen.queue("q").push({"data": 1})
            queen.queue("q").timeout_millis(1000).consume(handle, signal=enough)
            assert queen.queue("q").wait(False).pop() == []

    await in_thread(script)
    assert calls == [1, 1, 1]


async def test_errors_are_those_of_the_other_client(api: Api) -> None:
    def script() -> None:
        with QueenSync(api.url, strict=True) as queen, pytest.raises(LeaseLostError):
            queen.renew("00000000-0000-7000-8000-000000000000")
        away = QueenSync("http://127.0.0.1:1", retry_attempts=1)
        away.queue("q").buffer({"time_millis": 60_000}).push({"data": 1})
        with pytest.raises(UnsentError):
            away.close()
        away.close()

    await in_thread(script)


async def test_it_works_where_an_event_loop_runs(api: Api) -> None:
    """As in a notebook: the thread that calls it is inside a running event loop."""

    async def cell() -> list[Message]:
        with QueenSync(api.url) as queen:
            queen.queue("q").push({"data": 1})
            return queen.queue("q").pop()

    [message] = await asyncio.to_thread(asyncio.run, cell())
    assert message["data"] == 1


async def test_messages_left_in_buffers_are_sent_when_the_program_ends(api: Api) -> None:
    program = f"""
        from queen import QueenSync
        QueenSync({api.url!r}).queue("q").buffer({{"time_millis": 60_000}}).push({{"data": "late"}})
    """
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(program))
    assert await process.wait() == 0
    assert [message["data"] for message in await api.pop("q")] == ["late"]


@pytest.mark.parametrize(
    ("kind", "number"), [("Queen", signal.SIGINT), ("Queen", signal.SIGTERM), ("QueenSync", signal.SIGINT)]
)
async def test_signal_lets_the_handler_finish(api: Api, kind: str, number: signal.Signals) -> None:
    await api.push("q", 1, 2)
    programs = {
        "Queen": """
            import asyncio, sys
            from queen import Queen

            async def handle(message):
                print("begun", flush=True)
                await asyncio.to_thread(sys.stdin.readline)
                print("done", flush=True)

            async def main():
                async with Queen(sys.argv[1]) as queen:
                    await queen.queue("q").consume(handle)
                print("closed", flush=True)

            asyncio.run(main())
        """,
        "QueenSync": """
            import sys
            from queen import QueenSync

            def handle(message):
                print("begun", flush=True)
                sys.stdin.readline()
                print("done", flush=True)

            with QueenSync(sys.argv[1]) as queen:
                try:
                    queen.queue("q").consume(handle)
                except KeyboardInterrupt:
                    pass
            print("closed", flush=True)
        """,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(programs[kind]),
        api.url,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    process.send_signal(number)
    # The handler goes on only when the program has had the signal.
    await asyncio.sleep(0.2)
    process.stdin.write(b"\n")
    output, _ = await asyncio.wait_for(process.communicate(), 20)
    assert output.split() == [b"done", b"closed"]
    assert process.returncode == 0
    assert [message["data"] for message in await api.pop("q", batch=10)] == [2]
