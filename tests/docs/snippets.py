"""The code blocks of a documentation page, and how each kind of them is run against one server."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, Final

from queen import Queen
from queen.streams import Runner

BLOCK: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EXCEPTED: Final = re.compile(r"<!-- not run: (.*) -->\n$")
RUN: Final = frozenset({"python", "sh", "bash", "http"})
_SHELL_SECONDS: Final = 120

# Commands that change the machine, wait for ever, or need machines that a test does not have.
NOT_RUN: Final = {
    "make": "a target of the Makefile",
    "PG_HOST=localhost": "needs a PostgreSQL of the reader's own",
    "pip": "installs packages",
    "export": "configures a server of its own",
    "docker": "needs Docker",
    "deploy/docker/make-secrets.sh": "needs Docker",
    "kubectl": "needs Kubernetes",
    "helm": "needs Kubernetes",
    "useradd": "changes the machine: tests/deploy",
    "pg_dump": "needs a PostgreSQL of its own: tests/deploy/test_backup.py",
    "pg_basebackup": "needs a PostgreSQL of its own: tests/deploy/test_backup.py",
    "touch": "needs a PostgreSQL of its own: tests/deploy/test_backup.py",
    "cd": "needs a PostgreSQL of its own: tests/deploy/test_backup.py",
    "./pg_ctl": "needs a PostgreSQL of its own: tests/deploy/test_backup.py",
    "queen pipeline": "starts a Spark of its own: tests/pipelines",
    "queen shards": "needs several PostgreSQL instances: tests/shards",
    "QUEEN_CLIENT_LOG=true": "shows the log of a program of the reader's own: tests/client/test_log.py",
}


@dataclass(frozen=True)
class Snippet:
    """A code block that can be run, and the output shown below it."""

    page: Path
    line: int
    language: str
    code: str
    output: str | None
    excepted: str = ""
    """The reason in a comment `<!-- not run: reason -->` above the block."""

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def not_run(self) -> str:
        """Why this is left out; empty for a snippet that runs."""
        if self.excepted or self.language not in ("sh", "bash"):
            return self.excepted
        lines = (line for line in self.code.splitlines() if line.strip() and not line.startswith("#"))
        first = next(lines, "")
        return next((reason for command, reason in NOT_RUN.items() if f"{first} ".startswith(f"{command} ")), "")


def snippets(page: Path) -> Iterator[Snippet]:
    """The blocks of a page that can be run; a `text` block right after one is its output."""
    text = page.read_text()
    found = list(BLOCK.finditer(text))
    for index, block in enumerate(found):
        if block[1] not in RUN:
            continue
        output = next(
            (
                following[2]
                for following in found[index + 1 : index + 2]
                if following[1] == "text" and not text[block.end() : following.start()].strip()
            ),
            None,
        )
        excepted = _EXCEPTED.search(text, 0, block.start())
        yield Snippet(
            page,
            text.count("\n", 0, block.start()) + 2,
            block[1],
            block[2],
            output,
            excepted[1] if excepted is not None else "",
        )


def matches(printed: str, shown: str) -> bool:
    """Whether the output is as shown; `…` on the page stands for ids, times and whatever else changes."""
    return re.fullmatch(".*?".join(map(re.escape, shown.rstrip().split("…"))), printed.rstrip(), re.DOTALL) is not None


@dataclass
class Walk:
    """Runs the snippets of a page one after the other, with Python names kept between them."""

    url: str
    directory: Path
    replaced: dict[str, str] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)

    def page(self, page: Path) -> list[str]:
        """Run a page; the snippets whose output is not as shown, or that failed."""
        failures: list[str] = []
        with asyncio.Runner() as runner:
            queen = runner.run(_make_client(self.url))
            names = {"__name__": "__main__", "queen": queen, "Queen": Queen, **self.names}
            for snippet in snippets(page):
                if snippet.not_run:
                    print(f"{snippet.where} is not run: {snippet.not_run}")
                    continue
                printed = self._run(snippet, names, runner)
                if snippet.output is not None and not matches(printed, snippet.output):
                    failures.append(f"{snippet.where} shows\n{snippet.output}but prints\n{printed}")
            runner.run(queen.close())
        return failures

    def _run(self, snippet: Snippet, names: dict[str, Any], runner: asyncio.Runner) -> str:
        code = snippet.code
        for old, new in self._replacements().items():
            code = code.replace(old, new)
        if snippet.language == "python":
            return _run_python(snippet, code, names, runner)
        if snippet.language == "http":
            return self._run_http(code)
        return self._run_shell(snippet, code)

    def _replacements(self) -> dict[str, str]:
        address = self.url.removeprefix("http://")
        return {
            "localhost:6632": address,
            "127.0.0.1:6632": address,
            "/tmp/": f"{self.directory}/",
            # After the one above: the clone itself may be below /tmp.
            ".venv/bin/": f"{Path(sys.executable).parent}/",
            **self.replaced,
        }

    def _run_shell(self, snippet: Snippet, code: str) -> str:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self.directory,
            env=os.environ | {"PATH": path, "QUEEN_URL": self.url, "QUEEN_SERVER": self.url},
            capture_output=True,
            text=True,
            timeout=_SHELL_SECONDS,
            check=False,
        )
        assert ended.returncode == 0, f"{snippet.where} exits with {ended.returncode}:\n{ended.stderr}"
        return ended.stdout

    def _run_http(self, code: str) -> str:
        line, _, body = code.partition("\n")
        method, path = line.split()
        request = urllib.request.Request(self.url + path, body.encode() or None, method=method)
        with urllib.request.urlopen(request, timeout=_SHELL_SECONDS) as answer:
            text: str = answer.read().decode()
            return text


def _run_python(snippet: Snippet, text: str, names: dict[str, Any], runner: asyncio.Runner) -> str:
    code = _compiled(text, snippet.page, snippet.line)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        if not code.co_flags & inspect.CO_COROUTINE:
            exec(code, names)
        else:
            runner.run(_awaited(code, names))
    stream = names.pop("runner", None)
    if isinstance(stream, Runner):
        runner.run(stream.stop())
    return output.getvalue()


def _compiled(code: str, page: Path, line: int) -> CodeType:
    """The code with the lines of the page, so that a traceback points there; `await` may stand alone."""
    tree = ast.increment_lineno(ast.parse(code), line - 1)
    result: CodeType = compile(tree, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return result


async def _awaited(code: CodeType, names: dict[str, Any]) -> None:
    await eval(code, names)


async def _make_client(url: str) -> Queen:
    return Queen(url)
