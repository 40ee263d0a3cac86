"""What topics promise, checked on a history: nothing lost or given after its ack, in order, in time, to one at a time.

Calls that are read (`op`):
- `enqueue`: args `items` [[name, priority, delay, keyed], …]; answer: the ids
- `dequeue`: answer `owner` and `items` [[id, name, priority], …]
- `ack`, `nack`: args `owner` and `ids`; answer: whether each succeeded
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tests.campaign.history import Call, Outcome, Violation


class TopicState(NamedTuple):
    """The final state: ids of items that are left, and of dead letters."""

    left: Collection[int]
    dead: Collection[int]


@dataclass(frozen=True)
class TopicRules:
    """`strict`: what is answered to an enqueue is there for the next dequeue, in its place.

    `drained`: consumers went on until nothing came any more, so that everything has been acked, or is a dead letter."""

    workload: str
    lease_seconds: float
    strict: bool = True
    drained: bool = True


class TopicChecker:
    """Reads the calls of one topic and its final state."""

    def __init__(self, calls: Iterable[Call], final: TopicState, rules: TopicRules) -> None:
        self._rules = rules
        self._final = final
        self._violations: list[Violation] = []
        by_op: defaultdict[str, list[Call]] = defaultdict(list)
        for call in calls:
            by_op[call.op].append(call)
        self._enqueues = by_op["enqueue"]
        self._dequeues = sorted(by_op["dequeue"], key=lambda call: call.ended)
        self._ends = [call for call in by_op["ack"] + by_op["nack"] if call.possible]
        self._given: defaultdict[int, list[Call]] = defaultdict(list)
        for call in self._dequeues:
            for id, _, _ in call.answer["items"] if call.ok and call.answer else ():
                self._given[id].append(call)
        self._made: dict[int, tuple[Call, str, int, float]] = {}
        """By id: the call that was answered with it first, name, priority, and when it was due at the earliest."""
        self._due_by: dict[int, float] = {}
        """By id: when it was due at the latest."""

    def check(self) -> list[Violation]:
        self._check_ids()
        self._check_acks()
        for id, calls in self._given.items():
            self._check_leases(id, calls)
        for call in self._dequeues:
            if call.ok and call.answer:
                self._check_answer(call)
        for id, (call, name, _, _) in self._made.items():
            if id not in self._given:
                where = "left" if id in self._final.left else "nowhere"
                self._found("lost" if where == "nowhere" else "never delivered", f"{name} ({id}) is {where}", call)
        if self._rules.drained:
            self._check_unacked()
        return self._violations

    def _found(self, kind: str, text: str, *calls: Call) -> None:
        self._violations.append(Violation(self._rules.workload, kind, text, calls))

    def _check_ids(self) -> None:
        first_sent: dict[str, float] = {}
        by_key: dict[str, tuple[int, Call]] = {}
        for call in self._enqueues:
            for name, *_ in call.args["items"]:
                first_sent.setdefault(name, call.began)
        for call in self._enqueues:
            if not call.ok:
                continue
            for (name, priority, delay, keyed), id in zip(call.args["items"], call.answer, strict=True):
                known = self._made.get(id)
                if known is not None and known[1] != name:
                    self._found("an id twice", f"{id} is {known[1]} and {name}", known[0], call)
                self._made.setdefault(id, (call, name, priority, first_sent[name] + delay))
                self._due_by.setdefault(id, call.ended + delay)
                if keyed and by_key.setdefault(name, (id, call))[0] != id:
                    self._found("a key twice", f"{name} is {by_key[name][0]} and {id}", by_key[name][1], call)

    def _check_acks(self) -> None:
        acked: dict[int, Call] = {}
        for call in sorted(self._ends, key=lambda call: call.ended):
            if call.op != "ack" or not call.ok:
                continue
            for id, success in zip(call.args["ids"], call.answer, strict=True):
                if success and id in acked:
                    self._found("acked twice", str(id), acked[id], call)
                if success:
                    acked.setdefault(id, call)
        for id, call in acked.items():
            if id in self._final.left or id in self._final.dead:
                self._found("there after its ack", str(id), call)
            for given in self._given.get(id, ()):
                if given.began > call.ended:
                    self._found("doubled after its ack", str(id), call, given)

    def _check_unacked(self) -> None:
        """What was given and never acked has to come again, until it is a dead letter."""
        acked: set[int] = set()
        for call in self._ends:
            if call.op == "ack":
                answers = call.answer if call.ok else [True] * len(call.args["ids"])
                acked |= {id for id, success in zip(call.args["ids"], answers, strict=True) if success}
        for id, calls in self._given.items():
            if id in self._final.left:
                self._found("not delivered again", f"{id} is left", calls[-1])
            elif id not in acked and id not in self._final.dead:
                self._found("lost", f"{id} is nowhere, and was never acked", *calls)

    def _check_leases(self, id: int, calls: list[Call]) -> None:
        for held, other in pairwise(calls):
            owner = held.answer["owner"]
            expires = min(held.began, other.began) + self._rules.lease_seconds
            ended = any(
                call.args["owner"] == owner and id in call.args["ids"] and call.began < other.ended
                for call in self._ends
            )
            if other.ended < expires and owner != other.answer["owner"] and not ended:
                self._found("two leases", f"{id} was leased until {expires:.3f}", held, other)

    def _check_answer(self, call: Call) -> None:
        items = call.answer["items"]
        priorities = [priority for _, _, priority in items]
        if priorities != sorted(priorities):
            self._found("reordered", f"priorities {priorities}", call)
        for id, name, _ in items:
            made = self._made.get(id)
            if made is None:
                continue
            if made[1] != name:
                self._found("another payload", f"{id} is {name}, and was {made[1]}", made[0], call)
            if call.ended < made[3]:
                self._found("too early", f"{name} was due at {made[3]:.3f}", made[0], call)
        if self._rules.strict and items:
            self._check_priority(call, priorities[-1])

    def _check_priority(self, call: Call, lowest: int) -> None:
        """Nothing more urgent was there, due and held by nobody."""
        # A dequeue whose answer is not known may hold anything for as long as its lease lasts.
        horizon = call.began - self._rules.lease_seconds - 1
        if any(
            other.outcome is Outcome.UNKNOWN and other.began < call.ended and other.ended > horizon
            for other in self._dequeues
        ):
            return
        for id, (made, name, priority, _) in self._made.items():
            if priority >= lowest or self._due_by[id] >= call.began:
                continue
            if not any(given.began < call.ended for given in self._given.get(id, ())):
                text = f"{name} (priority {priority}) was there, and priority {lowest} was given"
                self._found("overtaken", text, made, call)
