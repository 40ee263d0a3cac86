"""A clock that tests set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Number = TypeVar("Number", int, float)


@dataclass(slots=True)
class Clock(Generic[Number]):
    """Returns `now` when called; tests change it."""

    now: Number

    def __call__(self) -> Number:
        return self.now
