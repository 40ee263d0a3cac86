"""What a campaign says at its end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.campaign.history import Outcome, Violation

_MOST_SHOWN = 5
"""Violations of one kind and workload that are printed."""


@dataclass
class Totals:
    """Sums over rounds."""

    rounds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    calls: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    recoveries: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    violations: list[Violation] = field(default_factory=list)
    server_errors: int = 0
    tracebacks: int = 0

    def add(self, other: Totals) -> None:
        self.rounds += other.rounds
        self.faults += other.faults
        self.calls += other.calls
        for kind, times in other.recoveries.items():
            self.recoveries[kind] += times
        self.violations += other.violations
        self.server_errors += other.server_errors
        self.tracebacks += other.tracebacks

    def text(self) -> str:
        lines = [f"{sum(self.faults.values())} faults in {self.rounds} rounds", ""]
        rows = [["fault", "count", "recovery p50", "p99", "most, s"]]
        for kind in sorted(self.faults.keys() | self.recoveries.keys()):
            times = sorted(self.recoveries.get(kind, ()))
            figures = [f"{quantile(times, q):.2f}" if times else "-" for q in (0.5, 0.99, 1.0)]
            rows.append([kind, str(self.faults[kind] or "-"), *figures])
        lines += table(rows)
        rows = [["call", *Outcome]]
        for op in sorted({op for op, _ in self.calls}):
            rows.append([op, *(str(self.calls[op, outcome]) for outcome in Outcome)])
        lines += ["", *table(rows), ""]
        lines.append(
            f"violations {len(self.violations)}, 5xx other than 503 {self.server_errors}, tracebacks {self.tracebacks}"
        )
        return "\n".join(lines)


def quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return lines


def shown(violations: Iterable[Violation]) -> str:
    """The violations, of each kind the first few with the fewest calls."""
    by_kind: defaultdict[tuple[str, str], list[Violation]] = defaultdict(list)
    for violation in violations:
        by_kind[violation.workload, violation.kind].append(violation)
    texts = []
    for (workload, kind), several in by_kind.items():
        several.sort(key=lambda violation: len(violation.calls))
        texts += [str(violation) for violation in several[:_MOST_SHOWN]]
        if len(several) > _MOST_SHOWN:
            texts.append(f"{workload}: {kind}: {len(several) - _MOST_SHOWN} more")
    return "\n".join(texts)
