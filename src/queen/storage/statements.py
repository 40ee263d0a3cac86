"""Every SQL text by its name. The texts live in `sql/*.sql`, each under a line `-- name: <name>`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


def sql(name: str) -> str:
    """The text of one statement."""
    return load_statements()[name]


@cache
def load_statements() -> Mapping[str, str]:
    """Read the `.sql` files that ship with the package; once, however many databases there are."""
    statements: dict[str, str] = {}
    for source in sorted(files("queen.storage").joinpath("sql").iterdir(), key=lambda path: path.name):
        if not source.name.endswith(".sql"):
            continue
        pieces = _NAME.split(source.read_text("utf-8"))
        for name, text in zip(pieces[1::2], pieces[2::2], strict=True):
            if name in statements:
                raise ValueError(f"{source.name}: statement {name} is defined twice")
            statements[name] = text.strip()
    return statements
