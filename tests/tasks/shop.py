"""The application of the tests, run by real workers; what its tasks do is written to a file."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from queen.tasks import App, current_job

app = App(os.environ["QUEEN_TEST_URL"], namespace=os.environ["QUEEN_TEST_NAMESPACE"])
JOURNAL = Path(os.environ["QUEEN_TEST_JOURNAL"])


def note(line: str) -> None:
    """Append a line to the journal."""
    with JOURNAL.open("a") as journal:
        journal.write(line + "\n")


@app.task(queue="math")
async def add(left: int, right: int) -> int:
    return left + right


@app.task(queue="math")
def multiply(left: int, right: int) -> int:
    """Runs in a thread."""
    return left * right


@app.task(queue="flaky", retries=2, backoff=0.05)
async def fail(times: int) -> int:
    """Fail so many times."""
    attempt = current_job().attempt
    note(f"attempt {attempt}")
    if attempt <= times:
        raise RuntimeError(f"attempt {attempt}")
    return attempt


@app.task(queue="flaky", retries=0, timeout=0.05)
async def endless() -> None:
    await asyncio.Event().wait()


@app.task(queue="flaky", retries=0)
async def odd() -> object:
    """Return what is no JSON."""
    return object()


@app.task(queue="flaky", retries=0)
async def give(kind: str) -> str:
    """Return, or raise, what cannot be stored."""
    match kind:
        case "large":
            return "x" * 1_100_000
        case "surrogate":
            return "\udce9"
        case "fine":
            return "done"
        case "large error":
            raise RuntimeError("x" * 1_100_000)
    raise RuntimeError("caf\udce9\0")


@app.task(queue="flaky", retries=0)
async def leave(how: str) -> None:
    """End with what is no ordinary error."""
    if how == "cancelled":
        raise asyncio.CancelledError
    if how == "interrupted":
        raise KeyboardInterrupt
    sys.exit(7)


@app.task(queue="flaky", retries=0)
def leave_thread() -> None:
    sys.exit(7)


gate = asyncio.Event()


@app.task(queue="slow")
async def wait(name: str) -> None:
    """Note the start, and wait for the event."""
    note(f"start {name}")
    await gate.wait()


@app.task(queue="slow")
def hold(name: str, gate: str) -> None:
    """Note the start, wait for a file, note the end."""
    note(f"start {name}")
    while not Path(gate).exists():
        time.sleep(0.02)
    note(f"end {name}")


@app.cron("* * * * *", "tick")
@app.task(queue="clock")
async def tick(what: str) -> None:
    note(what)
