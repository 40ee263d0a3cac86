"""docs/architecture.md names packages, modules and classes that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import queen

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = Path(queen.__file__).parent
TEXT: Final = (ROOT / "docs" / "architecture.md").read_text("utf-8")
MODULES: Final = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")}
ELSEWHERE: Final = {"bench/run.py", "bench/steady.py", "tests/test_import_graph.py"}


def test_every_module_that_is_named_by_its_file_exists() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", TEXT))
    assert named
    missing = {name for name in named - ELSEWHERE if not any(f"/{module}".endswith(f"/{name}") for module in MODULES)}
    assert missing == set()
    assert all((ROOT / name).exists() for name in ELSEWHERE)


def test_every_package_and_room_of_the_tables_exists() -> None:
    packages, rooms = _table("| package |"), _table("| room |")
    assert len(packages) > 15
    assert {name for names, _ in packages for name in names if not _exists(SOURCE, name)} == set()
    broker = SOURCE / "broker"
    assert {name for names, _ in rooms for name in names if not _exists(broker, name)} == set()
    there = {path.stem for path in broker.iterdir() if not path.name.startswith("__")}
    assert there == {Path(name).stem for names, _ in rooms for name in names}
    modules = {name for _, text in rooms for name in re.findall(r"`([a-z_]+)`", text)}
    assert {name for name in modules if not list(broker.rglob(f"{name}.py"))} == set()


def test_every_class_that_is_named_exists() -> None:
    classes = {
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)[`.(]", TEXT))
    assert len(named) > 40
    # The name by which Spark asks `pyspark_queen` for its data source.
    assert named - classes == {"DefaultSource"}


def _table(head: str) -> list[tuple[list[str], str]]:
    """The names in the first column of the table that begins so, and the rest of each row."""
    rows = []
    for line in TEXT[TEXT.index(head) :].splitlines()[2:]:
        if not line.startswith("|"):
            break
        first, rest = line.strip("|").split("|", 1)
        rows.append((re.findall(r"`([\w./]+)`", first), rest))
    return rows


def _exists(root: Path, name: str) -> bool:
    name = name.rstrip("/")
    return any((root / place).exists() for place in (name, f"{name}.py"))
