"""Maintenance: pushes go to the spool, pops are answered empty."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """Something that can be switched on for all workers of all hosts."""

    PUSH_MAINTENANCE = "maintenance_mode"
    """Pushes go to the spool, and stay there until it is switched off."""
    POP_MAINTENANCE = "pop_maintenance_mode"
    """Pops are answered empty at once."""


class Modes:
    """The modes as this worker knows them. `known` is false until they were read once."""

    def __init__(self) -> None:
        self.known = False
        self.push_maintenance = False
        self.pop_maintenance = False

    def learn(self, on: set[str]) -> bool:
        """These are on, and no others; returns whether that is news."""
        push, pop = Mode.PUSH_MAINTENANCE in on, Mode.POP_MAINTENANCE in on
        news = (push, pop) != (self.push_maintenance, self.pop_maintenance)
        self.known, self.push_maintenance, self.pop_maintenance = True, push, pop
        return news
