"""The snippets of all pages run on one server, one page after the other, and print what the pages show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from queen.client import errors
from tests.acceptance.served import Served, served
from tests.docs.snippets import BLOCK, Snippet, Walk, snippets

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
CLIENT_PAGES: Final = sorted((DOCS / "client").glob("*.md"))
PAGES: Final = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SPARK_PAGES: Final = {"spark.md", "spark-writing.md", "tables.md"}
SQL_PAGE: Final = "sql.md"

_QUEUE = re.compile(r"""(?:queue\(|from_\(|\.to\(|"queue": |pop/queue/|queue=)["']?([\w-]+)""")
_TOPIC = re.compile(r"""(?:topic\(|"namespace": |namespace=)["']?([\w-]+)""")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("docs"), QUEEN_SQS="true") as server:
        yield server


def runnable(page: Path) -> list[Snippet]:
    return [snippet for snippet in snippets(page) if not snippet.not_run]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if list(snippets(page))], ids=name)
def test_snippets_run_and_print_what_the_page_shows(page: Path, server: Served, tmp_path: Path) -> None:
    if page.name in SPARK_PAGES:
        pytest.skip("needs Spark: tests/spark/test_documentation.py, tests/pipelines/test_table_readers.py")
    if page.name == SQL_PAGE:
        pytest.skip("needs the database: tests/docs/test_sql.py")
    assert Walk(server.url, tmp_path).page(page) == []


def test_no_two_pages_use_the_same_queue_or_topic() -> None:
    used: dict[str, str] = {}
    for page in PAGES:
        if page.name in SPARK_PAGES:
            continue
        text = "\n".join(snippet.code for snippet in runnable(page))
        names = {f"queue {queue}" for queue in _QUEUE.findall(text)}
        names |= {f"namespace {namespace}" for namespace in _TOPIC.findall(text)}
        for each in names:
            assert used.setdefault(each, name(page)) == name(page), f"{each} is also used in {used[each]}"


def test_every_page_of_the_client_is_in_its_index() -> None:
    index = (DOCS / "client" / "README.md").read_text()
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert linked == {page.name for page in CLIENT_PAGES} - {"README.md"}


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    linked = {ROOT / target for target in re.findall(r"\]\(([\w/.-]+\.md)\)", readme)}
    assert set(DOCS.glob("*.md")) <= linked


def test_tree_of_errors_is_the_one_in_the_code() -> None:
    page = (DOCS / "client" / "errors.md").read_text()
    drawn = page[page.index("QueenError\n├") :].split("```")[0].strip()
    assert errors.__doc__ is not None
    assert drawn in errors.__doc__.replace("`", "")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", BLOCK.sub("", page.read_text())):
        assert target.startswith(("http://", "https://")) or (page.parent / target).exists(), target
