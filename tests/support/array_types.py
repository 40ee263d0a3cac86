"""asyncpg asks PostgreSQL on every connection how its types of arrays look: in tests that is much of their time."""

from __future__ import annotations

from typing import Any, Final

import asyncpg
import pytest

_FIRST_OF_USERS: Final = 16384
"""The types below are PostgreSQL's own, and the same in every database."""


def ask_once_for_array_types() -> None:
    """From now on, connections of this process share the answers."""
    known: dict[frozenset[int], Any] = {}
    ask = vars(asyncpg.Connection)["_introspect_types"]

    async def introspect_types(self: asyncpg.Connection[Any], oids: set[int], limit: float | None) -> Any:
        key = frozenset(oids)
        if key not in known:
            found = await ask(self, oids, limit)
            if max(key) >= _FIRST_OF_USERS:
                return found
            known[key] = found
        return known[key]

    pytest.MonkeyPatch().setattr(asyncpg.Connection, "_introspect_types", introspect_types)
