"""The history of a campaign: every call and its answer, and what a checker says when it finds one that cannot be."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec


class Outcome(StrEnum):
    OK = "ok"
    FAIL = "fail"
    """It did not happen."""
    UNKNOWN = "unknown"
    """It may have happened, or happen still."""


class Call(msgspec.Struct):
    """One call. Times are seconds since the history began."""

    number: int
    client: str
    op: str
    args: dict[str, Any]
    began: float
    ended: float = 0.0
    outcome: Outcome = Outcome.UNKNOWN
    answer: Any = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def possible(self) -> bool:
        """Whether it may have had an effect."""
        return self.outcome is not Outcome.FAIL

    def __str__(self) -> str:
        times = f"{self.began:9.3f} - {self.ended:9.3f}"
        said = self.error or _short(self.answer)
        return (
            f"{self.number:7d}  {times}  {self.client:<14} {self.op:<8} {self.outcome:<7} {_short(self.args)} -> {said}"
        )


@dataclass(frozen=True)
class Violation:
    """A promise that was broken, and the calls that show it."""

    workload: str
    kind: str
    text: str
    calls: tuple[Call, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.workload}: {self.kind}: {self.text}"]
        lines += [f"    {call}" for call in sorted(set_of(self.calls), key=lambda call: call.began)]
        return "\n".join(lines)


@dataclass
class History:
    """Calls in the order in which they began."""

    calls: list[Call] = field(default_factory=list)
    origin: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        return time.monotonic() - self.origin

    def begin(self, client: str, op: str, args: dict[str, Any]) -> Call:
        call = Call(len(self.calls), client, op, args, self.now())
        self.calls.append(call)
        return call

    def end(self, call: Call, outcome: Outcome, answer: Any = None, error: str = "") -> Call:
        call.ended, call.outcome, call.answer, call.error = self.now(), outcome, answer, error
        return call

    def of(self, workload: str, *ops: str) -> Iterator[Call]:
        """The calls of a workload that have ended; those of some kinds alone when kinds are given."""
        prefix = f"{workload}/"
        for call in self.calls:
            if call.ended and call.client.startswith(prefix) and (not ops or call.op in ops):
                yield call

    def outcomes(self) -> Counter[tuple[str, Outcome]]:
        """Calls by kind; what the nemesis did is counted elsewhere."""
        return Counter((call.op, call.outcome) for call in self.calls if call.client != "nemesis")

    def save(self, path: Path) -> None:
        path.write_bytes(b"".join(msgspec.json.encode(call) + b"\n" for call in self.calls))


def set_of(calls: Iterable[Call]) -> list[Call]:
    """Each call once."""
    return list({call.number: call for call in calls}.values())


def _short(value: Any, most: int = 240) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
