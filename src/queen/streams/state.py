"""State that a query keeps on the server: rows as they were read, and changes to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from queen.streams.records import Emit

WATERMARK_KEY = "__wm__"


@dataclass(frozen=True, slots=True)
class Row:
    """A value and its version, which a change to it names so that nobody else's is overwritten."""

    value: Any
    version: int | None = None

    def number(self, name: str) -> int | None:
        """A number in the value, when it is an object that has it."""
        found = self.value.get(name) if isinstance(self.value, Mapping) else None
        return int(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


Rows: TypeAlias = dict[str, Row]


@dataclass(slots=True)
class Outcome:
    """What a cycle comes to: changes of state, and what is emitted."""

    changes: list[dict[str, Any]] = field(default_factory=list)
    emits: list[Emit] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """When the windows end that it leaves open."""
    late: int = 0

    def upsert(self, key: str, value: Any, version: int | None) -> None:
        self.changes.append({"type": "upsert", "key": key, "value": value, "if_version": version})

    def delete(self, key: str, version: int | None) -> None:
        self.changes.append({"type": "delete", "key": key, "if_version": version})


def watermark_of(rows: Rows) -> int | None:
    """The watermark that was stored, if one was."""
    row = rows.get(WATERMARK_KEY)
    return row.number("eventTimeMs") if row is not None else None
