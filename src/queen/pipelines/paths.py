"""Paths as Spark takes them."""

from __future__ import annotations

from pathlib import Path


def local(path: Path) -> str:
    """A path of this machine, whatever file system is Spark's default. Spark takes no quoting: % is a character."""
    return f"file://{path.absolute()}"
