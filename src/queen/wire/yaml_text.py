"""Parses untrusted YAML: aliases must not expand to more values than the text has."""

from __future__ import annotations

from typing import Final

import yaml

_MOST_VALUES: Final = 100_000
"""What a document may expand to. Nine lines of aliases to aliases make a billion values."""


def check_aliases(text: str) -> None:
    """Raises `yaml.YAMLError` for a document whose aliases expand to very many values, or that contains itself."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.DocumentStartEvent):
            sizes = {}
        elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            open_nodes.append((event.anchor, 1))
            continue
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            anchor, size = open_nodes.pop()
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, 1
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in open_nodes):
                raise _refusal(event, "an alias refers to what it is a part of")
            anchor, size = None, sizes.get(event.anchor, 1)
        if not isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
            continue
        if anchor is not None:
            sizes[anchor] = size
        if open_nodes:
            size += open_nodes[-1][1]
            open_nodes[-1] = (open_nodes[-1][0], size)
        if size > _MOST_VALUES:
            raise _refusal(event, f"with its aliases this has more than {_MOST_VALUES} values")


def _refusal(event: yaml.Event, problem: str) -> yaml.YAMLError:
    error: yaml.YAMLError = yaml.composer.ComposerError(None, None, problem, event.start_mark)
    return error
