"""What a campaign says at its end; `python -m tests.campaign.report a.json b.json` adds up what several have saved."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests.campaign.history import Outcome, Violation

_MOST_SHOWN = 5
"""Violations of one kind and workload that are printed."""


class Saved(msgspec.Struct):
    """Totals as a file keeps them."""

    rounds: int
    faults: dict[str, int]
    in_storms: dict[str, int]
    calls: dict[str, dict[Outcome, int]]
    workloads: dict[str, int]
    recoveries: dict[str, list[float]]
    violations: list[str]
    server_errors: int
    tracebacks: int


@dataclass
class Totals:
    """Sums over rounds. Only faults that have hit something count."""

    rounds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    in_storms: Counter[str] = field(default_factory=Counter)
    calls: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    workloads: Counter[str] = field(default_factory=Counter)
    """In how many rounds each was run."""
    recoveries: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    violations: list[str] = field(default_factory=list)
    server_errors: int = 0
    tracebacks: int = 0

    def add(self, other: Totals) -> None:
        self.rounds += other.rounds
        self.faults += other.faults
        self.in_storms += other.in_storms
        self.calls += other.calls
        self.workloads += other.workloads
        for kind, times in other.recoveries.items():
            self.recoveries[kind] += times
        self.violations += other.violations
        self.server_errors += other.server_errors
        self.tracebacks += other.tracebacks

    def text(self) -> str:
        total, stormy = sum(self.faults.values()), sum(self.in_storms.values())
        lines = [f"{total} faults in {self.rounds} rounds, {stormy} of them in storms", ""]
        rows = [["fault", "count", "in storms", "recovery p50", "p99", "most, s"]]
        for kind in sorted(self.faults.keys() | self.recoveries.keys()):
            times = sorted(self.recoveries.get(kind, ()))
            figures = [f"{quantile(times, q):.2f}" if times else "-" for q in (0.5, 0.99, 1.0)]
            rows.append([kind, str(self.faults[kind] or "-"), str(self.in_storms[kind] or "-"), *figures])
        lines += table(rows)
        rows = [["workload", "rounds"], *([name, str(count)] for name, count in sorted(self.workloads.items()))]
        lines += ["", *table(rows)]
        rows = [["call", *Outcome]]
        for op in sorted({op for op, _ in self.calls}):
            rows.append([op, *(str(self.calls[op, outcome]) for outcome in Outcome)])
        lines += ["", *table(rows), ""]
        lines.append(
            f"calls {sum(self.calls.values())}, violations {len(self.violations)}, "
            f"5xx other than 503 {self.server_errors}, tracebacks {self.tracebacks}"
        )
        return "\n".join(lines)

    def save(self, path: Path) -> None:
        calls: defaultdict[str, dict[Outcome, int]] = defaultdict(dict)
        for (op, outcome), count in self.calls.items():
            calls[op][outcome] = count
        saved = Saved(
            self.rounds, self.faults, self.in_storms, calls, self.workloads,
            self.recoveries, self.violations, self.server_errors, self.tracebacks,
        )  # fmt: skip
        path.write_bytes(msgspec.json.encode(saved))

    @classmethod
    def load(cls, path: Path) -> Totals:
        saved = msgspec.json.decode(path.read_bytes(), type=Saved)
        calls = {(op, outcome): count for op, counts in saved.calls.items() for outcome, count in counts.items()}
        return cls(
            saved.rounds, Counter(saved.faults), Counter(saved.in_storms), Counter(calls), Counter(saved.workloads),
            defaultdict(list, saved.recoveries), saved.violations, saved.server_errors, saved.tracebacks,
        )  # fmt: skip


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


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m tests.campaign.report saved.json …")
    totals = Totals()
    for name in sys.argv[1:]:
        totals.add(Totals.load(Path(name)))
    print(totals.text(), *totals.violations, sep="\n")


if __name__ == "__main__":
    main()
