"""What dead letters promise, checked on a history: a message that failed is dead or was redriven, never both."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tests.campaign.history import Call, Violation

_COPY = re.compile(r"(.*):retry-\d+")


class DeadLetters(NamedTuple):
    """The final state: the transaction ids in the log, copies included, and those of dead letters."""

    stored: Sequence[str]
    dead: Sequence[str]


def check_dead_letters(workload: str, calls: Iterable[Call], final: DeadLetters) -> list[Violation]:
    """Calls are `push` and `ack` as of a log."""
    calls = list(calls)
    found: list[Violation] = []
    stored, dead = Counter(final.stored), Counter(final.dead)
    copies = Counter(match[1] for id in final.stored if (match := _COPY.fullmatch(id)))
    pushes = {id: call for call in calls if call.op == "push" and call.ok for _, id in call.args["items"]}
    acks: dict[str, list[Call]] = {}
    done: set[str] = set()
    failed: set[str] = set()
    died: set[str] = set()
    for call in calls:
        if call.op != "ack" or not call.possible:
            continue
        answers = call.answer if call.ok else [(None, None)] * len(call.args["messages"])
        for (_, id), (success, dead_now) in zip(call.args["messages"], answers, strict=True):
            acks.setdefault(id, []).append(call)
            if call.args["status"] == "failed":
                failed.add(id)
                if success and dead_now:
                    died.add(id)
            elif success is not False:
                done.add(id)

    def report(kind: str, id: str) -> None:
        several = [pushes[id]] if id in pushes else []
        text = f"{id}: {stored[id]} in the log, {dead[id]} dead, {copies[id]} redriven"
        found.append(Violation(workload, kind, text, (*several, *acks.get(id, ()))))

    for id in pushes:
        if not stored[id]:
            report("lost", id)
    for id in stored:
        places = dead[id] + copies[id]
        if stored[id] > 1:
            report("stored twice", id)
        if places > 1:
            report("doubled", id)
        if places and id not in failed:
            report("dead without having failed", id)
        if id in died and not places:
            report("lost dead letter", id)
        if id not in done and not places:
            report("never done", id)
    for id in dead:
        if not stored[id]:
            report("dead and not stored", id)
    return found
