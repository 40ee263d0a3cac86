"""Programs that end: by themselves, by Ctrl-C, by SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.support.api import Api


async def test_messages_left_in_buffers_are_sent_when_the_program_ends(api: Api) -> None:
    program = f"""
        from queen import QueenSync
        QueenSync({api.url!r}).queue("q").buffer({{"time_millis": 60_000}}).push({{"data": "late"}})
    """
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(program))
    assert await process.wait() == 0
    assert [message["data"] for message in await api.pop("q")] == ["late"]


async def test_sigterm_sends_what_is_buffered_before_it_ends_the_program(api: Api) -> None:
    program = """
        import asyncio, sys
        from queen import Queen

        async def main():
            queen = Queen(sys.argv[1])
            await queen.queue("q").buffer({"time_millis": 60_000}).push({"data": "late"})
            print("pushed", flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(program), api.url, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"pushed\n"
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 100) == -signal.SIGTERM
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
    await asyncio.sleep(0.5)
    process.stdin.write(b"\n")
    output, _ = await asyncio.wait_for(process.communicate(), 100)
    assert output.split() == [b"done", b"closed"]
    assert process.returncode == 0
    assert [message["data"] for message in await api.pop("q", batch=10)] == [2]
