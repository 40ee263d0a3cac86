"""What transactions promise, checked on a history: all or nothing, once for each message, in one order everywhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from tests.campaign.history import Call, Violation


class Transactions(NamedTuple):
    """The final state: what is in the source, and the names of transactions on each side, in order."""

    source: set[tuple[str, str]]
    sides: Mapping[str, Sequence[str]]


def check_transactions(workload: str, calls: Iterable[Call], final: Transactions) -> list[Violation]:
    """Calls are `transact` with args `name` and `of` (partition and transaction id, or none)."""
    attempts = {call.args["name"]: call for call in calls}
    places = {side: {name: place for place, name in enumerate(names)} for side, names in final.sides.items()}
    found: list[Violation] = []

    def report(kind: str, text: str, *several: Call) -> None:
        found.append(Violation(workload, kind, text, several))

    for side, names in final.sides.items():
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            report("stored twice", f"{twice[:5]} on {side}", *(attempts[name] for name in twice if name in attempts))
    for name, call in attempts.items():
        there = [side for side in final.sides if name in places[side]]
        if there and len(there) < len(final.sides):
            report("half a transaction", f"{name} is on {there} alone", call)
        if call.ok and call.answer["success"] and not there:
            report("lost", f"{name} was answered and is nowhere", call)
        if there and (not call.possible or (call.ok and not call.answer["success"])):
            report("stored though refused", name, call)

    made: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    some_side = next(iter(places.values()), {})
    for name in some_side:
        of = attempts[name].args["of"] if name in attempts else None
        if of is not None:
            made[tuple(of)].append(name)
    for message in final.source:
        names = made.get(message, [])
        several = [call for call in attempts.values() if call.args["of"] == list(message)]
        if len(names) > 1:
            report("doubled", f"{message} became {names}", *(attempts[name] for name in names))
        elif not names:
            report("lost", f"nothing became of {message}", *several)
    found += _check_serialisable(workload, attempts, final)
    return found


def _check_serialisable(workload: str, attempts: Mapping[str, Call], final: Transactions) -> list[Violation]:
    """There is one order of all transactions that each side and real time agree with."""
    after: defaultdict[str, set[str]] = defaultdict(set)
    for names in final.sides.values():
        for one, other in pairwise(names):
            after[one].add(other)
    stored = [call for name, call in attempts.items() if call.ok and call.answer["success"]]
    # It is enough to compare each with the latest one that had ended when it began.
    by_end = sorted(stored, key=lambda call: call.ended)
    ended = 0
    for call in sorted(stored, key=lambda call: call.began):
        while ended < len(by_end) and by_end[ended].ended < call.began:
            ended += 1
        for before in by_end[max(0, ended - 8) : ended]:
            after[before.args["name"]].add(call.args["name"])
    cycle = _cycle(after)
    if cycle is None:
        return []
    calls = tuple(attempts[name] for name in cycle if name in attempts)
    return [Violation(workload, "not serialisable", f"each of these is before the next: {' '.join(cycle)}", calls)]


def _cycle(after: Mapping[str, set[str]]) -> list[str] | None:
    """Some cycle of a graph."""
    done: set[str] = set()
    for start in list(after):
        if start in done:
            continue
        path: list[str] = []
        on_path: set[str] = set()
        stack = [(start, iter(sorted(after.get(start, ()))))]
        path.append(start)
        on_path.add(start)
        while stack:
            node, following = stack[-1]
            for other in following:
                if other in on_path:
                    return [*path[path.index(other) :], other]
                if other not in done:
                    stack.append((other, iter(sorted(after.get(other, ())))))
                    path.append(other)
                    on_path.add(other)
                    break
            else:
                stack.pop()
                done.add(node)
                on_path.discard(node)
                path.pop()
    return None
