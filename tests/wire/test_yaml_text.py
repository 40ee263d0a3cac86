"""Aliases of YAML: as they are meant, and as a bomb."""

from __future__ import annotations

import itertools

import pytest
import yaml

from queen.wire.yaml_text import check_aliases


def bomb(levels: int) -> str:
    names = [f"n{level}" for level in range(levels)]
    lines = [f"{names[0]}: &{names[0]} [{', '.join('x' * 9)}]"]
    for before, name in itertools.pairwise(names):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
    return "\n".join(lines)


def test_aliases_to_aliases_are_refused_before_they_are_followed() -> None:
    with pytest.raises(yaml.YAMLError, match="more than 100000 values"):
        check_aliases(bomb(12))


def test_a_document_that_contains_itself_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="refers to what it is a part of"):
        check_aliases("a: &a [1, *a]")


@pytest.mark.parametrize("text", ["a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 2}\n---\nb: 2", bomb(4), "", "just text"])
def test_aliases_as_people_use_them_are_fine(text: str) -> None:
    check_aliases(text)
