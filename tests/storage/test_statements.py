"""SQL lives in `storage/sql/*.sql`, under names that are used and with a line that says what each statement does."""

import ast
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

import queen
from queen.storage.statements import load_statements

SOURCES = Path(queen.__file__).parent
SQL = re.compile(
    r"\b(SELECT\s.*\bFROM\s|SELECT\s+(\w+\.)?\w+\(|INSERT\s+INTO\s|UPDATE\s+\S+\s+SET\s|DELETE\s+FROM\s"
    r"|(CREATE|DROP|ALTER|LOCK|TRUNCATE)\s+(OR\s+REPLACE\s+)?(TEMP\s+)?(TABLE|SCHEMA|TRIGGER|FUNCTION|INDEX)\b"
    r"|SET\s+LOCAL\s|COPY\s.*\bFROM\s)",
    re.DOTALL,
)
ALLOWED = {
    "pipelines/sinks.py": "the table is the user's, so its name and columns are part of the text",
    "pipelines/jobs/archive.py": "Spark's SQL",
    "pipelines/example/leads.py": "Spark's SQL, in a file that users edit",
}


@pytest.mark.parametrize("text", ["SELECT 1 FROM t", "UPDATE queen.shard SET a = 1", "LOCK TABLE queen.cursors"])
def test_sql_is_recognised(text: str) -> None:
    assert SQL.search(text)


def test_no_sql_in_python() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCES.rglob("*.py")):
        name = str(path.relative_to(SOURCES))
        texts = [text for text in _strings(ast.parse(path.read_text())) if SQL.search(text)]
        if texts:
            found[name] = texts
    assert {name: texts for name, texts in found.items() if name not in ALLOWED} == {}
    assert sorted(found) == sorted(ALLOWED), "a reason stands here for a file that needs none any more"


def test_every_statement_says_what_it_does() -> None:
    bare = [name for name, text in load_statements().items() if not text.startswith("-- ")]
    assert bare == []


def test_every_statement_is_used() -> None:
    python = "\n".join(path.read_text() for path in SOURCES.rglob("*.py"))
    named = set(re.findall(r"""["'](\w+)["']""", python))
    prefixes = tuple(re.findall(r"""f["'](\w+_)\{""", python))
    unused = [name for name in load_statements() if name not in named and not name.startswith(prefixes)]
    assert unused == []


def _strings(tree: ast.Module) -> Iterator[str]:
    """Every string of a module that is not a docstring; f-strings with their expressions left out."""
    docs = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)


def test_statements_ship_with_the_package() -> None:
    assert any(source.name == "moves.sql" for source in files("queen.storage").joinpath("sql").iterdir())
