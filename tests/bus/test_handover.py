"""The background jobs change hands within seconds, however their holder goes silent."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.support.proxy import Proxy

StartCandidate = Callable[[str], Awaitable["Candidate"]]


class Candidate:
    """A process that stands for election."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self, word: str, within: float = 100.0) -> None:
        assert self.process.stdout is not None
        async with asyncio.timeout(within):
            assert await self.process.stdout.readline() == word.encode() + b"\n"


@pytest.fixture
async def candidate() -> AsyncIterator[StartCandidate]:
    """Starts candidates on a database; they end with the test."""
    processes: list[asyncio.subprocess.Process] = []

    async def start(dsn: str) -> Candidate:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.bus.candidate", dsn, stdout=asyncio.subprocess.PIPE
        )
        processes.append(process)
        return Candidate(process)

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_when_the_holder_is_killed(candidate: StartCandidate, dsn: str) -> None:
    holder = await candidate(dsn)
    await holder.says("elected")
    other = await candidate(dsn)
    holder.process.send_signal(signal.SIGKILL)
    await other.says("elected")


async def test_when_the_holder_is_paused_which_then_knows_that_it_is_not_elected(
    candidate: StartCandidate, dsn: str
) -> None:
    holder = await candidate(dsn)
    await holder.says("elected")
    other = await candidate(dsn)
    holder.process.send_signal(signal.SIGSTOP)
    try:
        await other.says("elected")
    finally:
        holder.process.send_signal(signal.SIGCONT)
    await holder.says("lost")


async def test_when_the_connection_of_the_holder_goes_silent(candidate: StartCandidate, dsn: str) -> None:
    """No byte and no end of the connection arrives any more, as when a firewall forgets it."""
    proxy = Proxy(dsn)
    await proxy.start()
    try:
        holder = await candidate(proxy.dsn)
        await holder.says("elected")
        other = await candidate(dsn)
        async with proxy.stalled():
            await other.says("elected")
            await holder.says("lost")
    finally:
        await proxy.stop()


async def test_a_holder_with_nothing_to_do_stays_in_office(candidate: StartCandidate, dsn: str) -> None:
    holder = await candidate(dsn)
    await holder.says("elected")
    other = await candidate(dsn)
    with pytest.raises(TimeoutError):
        await other.says("elected", within=8)
