"""The code in the documentation of the client runs, and prints what the documentation says it prints."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from queen import Queen
from queen.client import errors
from tests.api import Api

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "client").glob("*.md"))
SERVER = "http://localhost:6632"
ALIAS = "http://127.0.0.1:6632"

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A piece of Python on a page, and what is printed below it."""

    line: int
    code: str
    printed: str | None


def examples(page: Path) -> Iterator[Example]:
    """The Python of a page; a block of text right after it is its output."""
    text = page.read_text()
    found = list(_BLOCK.finditer(text))
    for block, following in zip(found, [*found[1:], None], strict=True):
        if block[1] != "python":
            continue
        follows = following is not None and not text[block.end() : following.start()].strip()
        printed = following[2] if following is not None and follows and following[1] == "text" else None
        yield Example(text.count("\n", 0, block.start()) + 2, block[2], printed)


@pytest.mark.parametrize("page", [page for page in PAGES if list(examples(page))], ids=lambda page: page.stem)
async def test_page_runs_and_prints_what_it_says(page: Path, api: Api) -> None:
    # The server is in this thread's event loop; some of the examples wait without one.
    await asyncio.to_thread(run_page, page, api.url)


def run_page(page: Path, url: str) -> None:
    """Run the examples of a page one after the other, with names kept between them."""
    with asyncio.Runner() as runner:
        names: dict[str, Any] = {"__name__": "__main__"}
        queen = runner.run(make_client(url))
        names |= {"queen": queen, "Queen": Queen}
        for example in examples(page):
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                run(example, page, url, names, runner)
            if example.printed is not None:
                assert output.getvalue() == example.printed, f"{page.name}:{example.line}"
        runner.run(queen.close())


def run(example: Example, page: Path, url: str, names: dict[str, Any], runner: asyncio.Runner) -> None:
    code = compiled(example.code.replace(SERVER, url).replace(ALIAS, url), page, example.line)
    if "asyncio.run(" in example.code or not code.co_flags & inspect.CO_COROUTINE:
        exec(code, names)
    else:
        runner.run(awaited(code, names))


def compiled(code: str, page: Path, line: int) -> CodeType:
    """The code with the lines of the page, so that a traceback points there; `await` may stand alone."""
    tree = ast.increment_lineno(ast.parse(code), line - 1)
    result: CodeType = compile(tree, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return result


async def awaited(code: CodeType, names: dict[str, Any]) -> None:
    await eval(code, names)


async def make_client(url: str) -> Queen:
    return Queen(url)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "client" / "README.md").read_text()
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert linked == {page.name for page in PAGES} - {"README.md"}


def test_tree_of_errors_is_the_one_in_the_code() -> None:
    page = (ROOT / "docs" / "client" / "errors.md").read_text()
    drawn = page[page.index("QueenError\n├") :].split("```")[0].strip()
    assert errors.__doc__ is not None
    assert drawn in errors.__doc__.replace("`", "")


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", _BLOCK.sub("", page.read_text())):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
