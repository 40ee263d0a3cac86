"""What the docs and the error messages say about installing works as written, from a clone."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_LINE = re.compile(r"pip install [^`\n]*")
_EXTRAS = re.compile(r"\[([a-z0-9,]+)\]")


def install_lines() -> list[tuple[str, str]]:
    """Every mention of `pip install` that is about Queen, and the file it stands in."""
    files = [_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md"), *(_ROOT / "src").rglob("*.py")]
    return [
        (str(file.relative_to(_ROOT)), line)
        for file in files
        for line in _LINE.findall(file.read_text())
        if "queen-broker" in line or "'.[" in line
    ]


def test_install_lines_name_a_clone_because_the_distribution_is_on_no_registry() -> None:
    assert [each for each in install_lines() if re.search(r"queen-broker(?! @ )", each[1])] == []


def test_install_lines_name_extras_that_exist() -> None:
    known = set(tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    lines = install_lines()
    assert lines
    unknown = [
        (file, line)
        for file, line in lines
        for found in _EXTRAS.findall(line)
        if not known.issuperset(found.split(","))
    ]
    assert unknown == []
