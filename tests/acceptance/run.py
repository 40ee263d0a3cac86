"""Runs scenarios with a client and reports each as a line of JSON; started by the interpreter that has the client.

python -m tests.acceptance.run published '{"main": "http://127.0.0.1:6632"}' popping:an_empty_queue_pops_nothing ...
"""

from __future__ import annotations

import asyncio
import base64
import contextvars
import hashlib
import importlib
import importlib.metadata
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from tests.acceptance.client_environment import PUBLISHED
from tests.acceptance.scenario import TOKEN_VARIABLE, Client, Implementation, Scenario, Scene, Stopwatch
from tests.acceptance.scenarios import all_scenarios

_AT_ONCE = 6

# The client turns these failures into an empty answer and a printed line, so the line is all there is to see.
_SWALLOWED = ("Pop failed", "DLQ query failed", "[TRACE FAILED]", "Lease renewal failed", "Flush error", "Error flush")


def main() -> None:
    client = Implementation(sys.argv[1])
    urls: dict[str, str] = json.loads(sys.argv[2])
    wanted = set(sys.argv[3:])
    scenarios = [one for one in all_scenarios() if one.id in wanted]
    if client is Implementation.PUBLISHED:
        check_client_is_as_published()
    # The client prints as it goes; reports go where it does not.
    report = os.fdopen(os.dup(1), "w", buffering=1)
    asyncio.run(Runner(client, urls, report).run(scenarios))


def check_client_is_as_published() -> None:
    """Raise unless the client imported here is the published version, every file as it was packed."""
    name, _, version = PUBLISHED.partition("==")
    distribution = importlib.metadata.distribution(name)
    assert distribution.version == version, f"{distribution.version} is installed, not {PUBLISHED}"
    module = importlib.import_module("queen")
    assert str(module.__file__).startswith(sys.prefix), f"imported from {module.__file__}, not from {sys.prefix}"
    for file in distribution.files or []:
        if file.hash is not None and file.name.endswith(".py"):
            digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
            packed = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            assert packed == file.hash.value, f"{file} is not as it was published"


class Runner:
    """Runs scenarios, several at once where they allow it."""

    def __init__(self, client: Implementation, urls: dict[str, str], report: TextIO) -> None:
        self._client = client
        self._urls = urls
        self._report = report
        self._printed: contextvars.ContextVar[io.StringIO] = contextvars.ContextVar("printed")
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def run(self, scenarios: list[Scenario]) -> None:
        sys.stdout = PrintedByTask(self._printed)
        # The longest first, because those wait for the passing of time and cost nothing while they do.
        together = sorted((one for one in scenarios if not one.alone), key=lambda one: -one.seconds)
        await asyncio.gather(*(self._run_with_others(one) for one in together))
        for one in scenarios:
            if one.alone:
                await self._run_one(one)

    async def _run_with_others(self, one: Scenario) -> None:
        async with self._slots:
            await self._run_one(one)

    async def _run_one(self, one: Scenario) -> None:
        watch = Stopwatch()
        error = await asyncio.create_task(self._attempt(one))
        line = {"id": one.id, "error": error, "seconds": round(watch.seconds, 2)}
        self._report.write(json.dumps(line) + "\n")

    async def _attempt(self, one: Scenario) -> str | None:
        """Run one scenario; what went wrong, or None."""
        printed = io.StringIO()
        self._printed.set(printed)
        try:
            # What is enough on a quiet machine may not be on a busy one.
            async with asyncio.timeout(3 * one.seconds):
                await self._play(one, printed)
        except Exception:
            return f"{traceback.format_exc()}\nThe client printed:\n{printed.getvalue()[-3000:]}"
        return None

    async def _play(self, one: Scenario, printed: io.StringIO) -> None:
        new_client = importlib.import_module("queen").Queen
        if token := os.environ.get(TOKEN_VARIABLE):
            new_client = partial(client_with_token, new_client, token)
        url = self._urls[one.server.value]
        queen: Client = new_client(url)
        try:
            await one.function(Scene(one, url, queen, new_client, self._client.prefix))
        finally:
            await queen.close()
        swallowed = [line for line in printed.getvalue().splitlines() if line.startswith(_SWALLOWED)]
        assert not swallowed, f"the client swallowed errors: {swallowed}"


def client_with_token(make: Callable[..., Client], token: str, url: str | None = None, **options: Any) -> Client:
    """A client that shows a token; the published one takes none beside a URL that has no name."""
    if url is not None:
        options["url"] = url
    return make(**options | {"bearer_token": token})


class PrintedByTask(io.TextIOBase):
    """Standard output that keeps what each scenario printed apart."""

    def __init__(self, printed: contextvars.ContextVar[io.StringIO]) -> None:
        self._printed = printed

    def write(self, text: str) -> int:
        buffer: Any = self._printed.get(sys.stderr)
        count: int = buffer.write(text)
        return count


if __name__ == "__main__":
    main()
