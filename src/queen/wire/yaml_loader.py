"""Loading YAML that somebody else wrote: plain values alone, and no more of them than the text looks like."""

from __future__ import annotations

from typing import Any, Final

import yaml

_MOST_VALUES: Final = 100_000
"""What a document may expand to. Nine lines of aliases to aliases make a billion values."""


class BoundedLoader(yaml.SafeLoader):
    """A safe loader that refuses documents whose aliases expand to very many values, or that contain themselves."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if node is None:
            return None
        size = self._sizes.get(id(node))
        if size is None:
            if alias:
                self._refuse(node, "an alias refers to what it is a part of")
            size = self._sizes[id(node)] = 1 + sum(self._sizes[id(child)] for child in _children(node))
        if size > _MOST_VALUES:
            self._refuse(node, f"with its aliases this has more than {_MOST_VALUES} values")
        return node

    def _refuse(self, node: Any, problem: str) -> None:
        raise yaml.composer.ComposerError(None, None, problem, node.start_mark)


def _children(node: Any) -> list[Any]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []
