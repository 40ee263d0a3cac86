"""Modules import each other in one direction: also where the import is for types alone, or made inside a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import queen

_ROOT = Path(queen.__file__).parent
_PACKAGES = sorted(path.parent.name for path in _ROOT.glob("*/__init__.py"))


@pytest.mark.parametrize("package", _PACKAGES)
def test_no_module_of_a_package_imports_itself_through_others(package: str) -> None:
    graph = _graph(f"queen.{package}")
    assert graph
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_package_imports_itself_through_others() -> None:
    """Lazy imports count here, too, which the contracts of import-linter see, but not as circles among packages."""
    packages: dict[str, set[str]] = {}
    for module, imported in _graph("queen").items():
        here = _top(module)
        packages.setdefault(here, set()).update(_top(name) for name in imported)
        packages[here].discard(here)
    try:
        TopologicalSorter(packages).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_imports_of_every_kind_are_seen() -> None:
    source = """
from __future__ import annotations
import queen.settings
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from queen.errors import QueenError
def late() -> None:
    from queen.broker.pop import lanes
"""
    known = {"queen.settings", "queen.errors", "queen.broker.pop.lanes", "queen.broker.pop"}
    assert set(_imports(source, "queen.broker.broker", known)) == known - {"queen.broker.pop"}


def _top(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _graph(prefix: str) -> dict[str, set[str]]:
    """Each module below a package, and those below it that it imports."""
    sources = {_name(path): path.read_text("utf-8") for path in _ROOT.rglob("*.py")}
    inside = {name for name in sources if name == prefix or name.startswith(f"{prefix}.")}
    return {name: {*_imports(sources[name], name, inside)} - {name} for name in inside}


def _name(path: Path) -> str:
    parts = ("queen", *path.relative_to(_ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(source: str, module: str, known: set[str]) -> Iterator[str]:
    """The known modules that a source imports: of `from a import b` it is `a.b` if that is a module, else `a`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: imports are absolute here"
            base = node.module or ""
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                if deeper in known:
                    yield deeper
                elif base in known:
                    yield base
