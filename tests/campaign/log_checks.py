"""What a log promises, checked on a history: nothing lost, doubled, reordered or skipped, one live lease.

Calls that are read (`op`):
- `push`: args `items` [[partition, transaction id], …] and `host`; answer [[status, message id], …]
- `pop`: args `group`; answer `lease` and `messages` [[partition, transaction id], …]; `since` is when it could first
  have been granted, where that was before the call began
- `ack`: args `group`, `lease` and `messages` [[partition, transaction id], …]; answer [[success, dead], …]
- `seek`: args `group`, `partition` and `offset`
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple, TypeAlias

from tests.campaign.history import Call, Outcome, Violation

_SEEK_SECONDS = 6.0
"""How long after its end a seek of unknown outcome may still happen."""

Key: TypeAlias = tuple[str, str]
"""Partition and transaction id."""


Span: TypeAlias = tuple[float, float, int, Call]
"""When a message was sent and answered, its offset, and the call."""


class Message(NamedTuple):
    """A message as it lies in its partition at the end."""

    offset: int
    id: str
    transaction_id: str


class Log(NamedTuple):
    """The final state of a queue, by partition."""

    partitions: Mapping[str, Sequence[Message]]


@dataclass(frozen=True)
class Rules:
    """What of it a workload promises."""

    workload: str
    lease_seconds: float = 2.0
    dedup: bool = True
    """Whether a transaction id is stored once. Else the same id may be there again when it was sent again."""
    spooled_in_order: bool = True
    """Whether messages that waited in a spool keep their place among the others."""
    complete: bool = True
    """Whether every group has been given everything by the end."""
    drained: bool = True
    """Whether consumers went on until nothing came any more: then all of it has been acked."""
    releases: bool = False
    """Whether leases may end without an ack: consumers that disconnect, nack, or are sought."""


@dataclass(frozen=True)
class Sent:
    """A message in one request: the request, and what was answered for it."""

    call: Call
    status: str
    message_id: str | None


@dataclass(frozen=True)
class Move:
    """Something that moves a cursor up to an offset: an ack, or a seek."""

    call: Call
    offset: int
    sure: bool


class LogChecker:
    """Reads the calls of one queue and its final state."""

    def __init__(self, calls: Iterable[Call], log: Log, rules: Rules) -> None:
        self._rules = rules
        self._log = log
        self._place: dict[Key, Message] = {}
        self._violations: list[Violation] = []
        by_op: defaultdict[str, list[Call]] = defaultdict(list)
        for call in calls:
            by_op[call.op].append(call)
        self._pushes, self._pops = by_op["push"], [call for call in by_op["pop"] if call.ok and call.answer]
        self._groups = {call.args["group"] for call in by_op["pop"] + by_op["ack"]}
        self._acks, self._seeks = by_op["ack"], [call for call in by_op["seek"] if call.possible]
        self._sends = self._read_sends()

    def check(self) -> list[Violation]:
        self._check_stored()
        self._check_sends()
        self._check_order()
        for (group, partition), pops in self._deliveries().items():
            self._check_deliveries(group, partition, pops)
        return self._violations

    def _found(self, kind: str, text: str, *calls: Call) -> None:
        self._violations.append(Violation(self._rules.workload, kind, text, calls))

    def _read_sends(self) -> dict[Key, list[Sent]]:
        sends: defaultdict[Key, list[Sent]] = defaultdict(list)
        for call in self._pushes:
            answers = call.answer if call.ok else [("", None)] * len(call.args["items"])
            for (partition, id), (status, message_id) in zip(call.args["items"], answers, strict=True):
                sends[partition, id].append(Sent(call, status, message_id))
        return sends

    # What is stored.

    def _check_stored(self) -> None:
        for partition, messages in self._log.partitions.items():
            for before, after in pairwise(messages):
                if after.offset != before.offset + 1:
                    self._found("gap", f"{partition}: offset {after.offset} follows {before.offset}")
            for message in messages:
                key = partition, message.transaction_id
                sent = [one.call for one in self._sends.get(key, ())]
                if key in self._place and self._rules.dedup:
                    self._found(
                        "stored twice", f"{_name(key)} at {self._place[key].offset} and {message.offset}", *sent
                    )
                self._place.setdefault(key, message)
                if not any(call.possible for call in sent):
                    self._found("stored though refused", f"{_name(key)} at offset {message.offset}", *sent)

    def _check_sends(self) -> None:
        for key, sent in self._sends.items():
            answered = [one for one in sent if one.call.ok and one.status in ("queued", "duplicate", "buffered")]
            if answered and key not in self._place:
                self._found("lost", f"{_name(key)} was answered {answered[0].status}", *(one.call for one in answered))
                continue
            if self._rules.dedup:
                self._check_ids(key, sent)

    def _check_ids(self, key: Key, sent: list[Sent]) -> None:
        queued = [one for one in sent if one.status == "queued"]
        if len(queued) > 1:
            self._found("queued twice", _name(key), *(one.call for one in queued))
        for one in sent:
            # Of what was sent more than once, and spooled, another attempt may be the one that is stored.
            sure = one.status in ("queued", "duplicate") or (one.status == "buffered" and len(sent) == 1)
            if sure and one.message_id and key in self._place and one.message_id != self._place[key].id:
                text = f"{_name(key)} was answered {one.message_id} and is stored as {self._place[key].id}"
                self._found("another id", text, one.call)

    # The order of what is stored.

    def _check_order(self) -> None:
        """What was sent to a host after the answer for something else is stored behind it."""
        spans: defaultdict[tuple[str, Any], list[Span]] = defaultdict(list)
        for key, sent in self._sends.items():
            first_ok = next((one.call for one in sent if one.call.ok), None)
            hosts = {one.call.args.get("host") for one in sent}
            if first_ok is None or key not in self._place or len(hosts) > 1:
                continue
            if not self._rules.spooled_in_order and any(one.status == "buffered" for one in sent):
                continue
            began = min(one.call.began for one in sent)
            place = self._place[key].offset
            spans[key[0], hosts.pop()].append((began, first_ok.ended, place, first_ok))
        for (partition, _), several in spans.items():
            several.sort(key=lambda one: one[1])
            ends = [one[1] for one in several]
            highest = list(accumulate(several, _behind))
            for began, _, offset, call in several:
                before = bisect_left(ends, began) - 1
                if before >= 0 and highest[before][2] > offset:
                    text = f"{partition}: offset {offset} was sent after offset {highest[before][2]} was answered"
                    self._found("reordered", text, highest[before][3], call)

    # What is delivered.

    def _deliveries(self) -> dict[Key, list[tuple[Call, list[int]]]]:
        """By group and partition: pops and the offsets that each was given."""
        found: defaultdict[Key, list[tuple[Call, list[int]]]] = defaultdict(list)
        for group in self._groups:
            for partition in self._log.partitions:
                found[group, partition] = []
        for call in self._pops:
            by_partition: defaultdict[str, list[int]] = defaultdict(list)
            for partition, id in call.answer["messages"]:
                message = self._place.get((partition, id))
                if message is None:
                    self._found("not stored", f"{_name((partition, id))} was delivered, and is nowhere", call)
                else:
                    by_partition[partition].append(message.offset)
            for partition, offsets in by_partition.items():
                found[call.args["group"], partition].append((call, offsets))
        return found

    def _check_deliveries(self, group: str, partition: str, pops: list[tuple[Call, list[int]]]) -> None:
        where = f"{group} on {partition}"
        cursor = Cursor(self._moves(group, partition), self._seeks_of(group, partition))
        for call, offsets in pops:
            if offsets != list(range(offsets[0], offsets[0] + len(offsets))):
                self._found("reordered", f"{where}: delivered {offsets}", call)
            since = call.answer.get("since", call.began)
            least, sure = cursor.least(since, call.ended)
            most, maybe = cursor.most(since, call.ended)
            if offsets[0] < least and sure is not None:
                text = f"{where}: offset {offsets[0]} was delivered after everything below {least} was acked"
                self._found("doubled after its ack", text, *self._sent_as(partition, offsets[0]), sure, call)
            elif offsets[0] > most:
                text = f"{where}: delivered from {offsets[0]} on, and nothing above {most} was acked"
                self._found("skipped", text, *([maybe] if maybe is not None else []), call)
        if not self._rules.releases:
            self._check_leases(where, group, partition, pops)
        if self._rules.complete:
            given = {offset for _, offsets in pops for offset in offsets}
            for message in self._log.partitions[partition]:
                if message.offset not in given:
                    sent = [one.call for one in self._sends.get((partition, message.transaction_id), ())]
                    self._found("never delivered", f"{where}: {message.transaction_id} at {message.offset}", *sent)
        if self._rules.drained and pops:
            self._check_end(where, cursor, pops)

    def _check_end(self, where: str, cursor: Cursor, pops: list[tuple[Call, list[int]]]) -> None:
        """What was given and never acked has to come again."""
        most, acked = cursor.most(inf, inf)
        last = max(max(offsets) for _, offsets in pops)
        if most <= last:
            held = next(call for call, offsets in reversed(pops) if max(offsets) >= most)
            text = f"{where}: nothing from {most} to {last} was acked, and it did not come again"
            self._found("not delivered again", text, *([acked] if acked is not None else []), held)

    def _check_leases(self, where: str, group: str, partition: str, pops: list[tuple[Call, list[int]]]) -> None:
        """While a lease lives and nothing has ended it, its partition is given to nobody else of the group."""
        ordered = sorted(pops, key=lambda one: one[0].ended)
        for (held, offsets), (other, _) in pairwise(ordered):
            if held.answer["lease"] == other.answer["lease"]:
                continue
            granted = min(call.answer.get("since", call.began) for call in (held, other))
            expires = granted + self._rules.lease_seconds
            ends = [
                call
                for call in self._acks
                if call.args["lease"] == held.answer["lease"] and call.possible and call.began < other.ended
            ]
            if other.ended < expires and not ends:
                text = f"{where}: offsets {offsets} were leased until {expires:.3f}, and given to another"
                self._found("two leases", text, held, other)

    def _moves(self, group: str, partition: str) -> list[Move]:
        moves = []
        for call in self._acks:
            if call.args["group"] != group or not call.possible:
                continue
            answers = call.answer if call.ok else [(None, False)] * len(call.args["messages"])
            status = call.args.get("status", "completed")
            for (one, id), (success, dead) in zip(call.args["messages"], answers, strict=True):
                message = self._place.get((one, id))
                if one != partition or message is None or success is False:
                    continue
                consumed = status == "completed" or dead or (status == "failed" and not call.ok)
                if consumed:
                    moves.append(Move(call, message.offset + 1, call.ok))
        return moves

    def _seeks_of(self, group: str, partition: str) -> list[Move]:
        return [
            Move(call, call.args["offset"], call.ok)
            for call in self._seeks
            if call.args["group"] == group and call.args["partition"] in (partition, None)
        ]

    def _sent_as(self, partition: str, offset: int) -> list[Call]:
        first = self._log.partitions[partition][0].offset
        id = self._log.partitions[partition][offset - first].transaction_id
        return [one.call for one in self._sends.get((partition, id), ())]


class Cursor:
    """Between which offsets the cursor of a group can have been at a moment."""

    def __init__(self, acks: list[Move], seeks: list[Move]) -> None:
        self._acks = acks
        self._seeks = sorted(seeks, key=lambda move: move.call.ended)
        sure = sorted((move for move in acks if move.sure), key=lambda move: move.call.ended)
        self._sure_ends = [move.call.ended for move in sure]
        self._sure = list(accumulate(sure, _higher))
        possible = sorted(acks, key=lambda move: move.call.began)
        self._possible_begins = [move.call.began for move in possible]
        self._possible = list(accumulate(possible, _higher))

    def least(self, since: float, until: float) -> tuple[int, Call | None]:
        """The lowest it can have been between two moments, and the call that says so."""
        if self._seeks:
            return self._least_sought(since, until)
        index = bisect_left(self._sure_ends, since) - 1
        return (self._sure[index].offset, self._sure[index].call) if index >= 0 else (0, None)

    def most(self, since: float, until: float) -> tuple[int, Call | None]:
        """The highest it can have been between two moments, and the call that says so."""
        if self._seeks:
            return self._most_sought(since, until)
        index = bisect_left(self._possible_begins, until) - 1
        return (self._possible[index].offset, self._possible[index].call) if index >= 0 else (0, None)

    def _least_sought(self, since: float, until: float) -> tuple[int, Call | None]:
        last, later = self._around(since, until)
        if later:
            return min([seek.offset for seek in later] + [last.offset if last else 0]), None
        settled = last.call.ended if last is not None else 0.0
        acks = [move for move in self._acks if move.sure and move.call.began > settled and move.call.ended < since]
        return _highest([*acks, *([last] if last else [])])

    def _most_sought(self, since: float, until: float) -> tuple[int, Call | None]:
        last, later = self._around(since, until)
        begun = last.call.began if last is not None else 0.0
        acks = [move for move in self._acks if move.call.ended > begun and move.call.began < until]
        return _highest([*acks, *later, *([last] if last else [])])

    def _around(self, since: float, until: float) -> tuple[Move | None, list[Move]]:
        """The last seek that has surely happened by the first moment, and those that may have come after it."""
        last = next((seek for seek in reversed(self._seeks) if seek.sure and seek.call.ended < since), None)
        begun = last.call.began if last is not None else 0.0
        later = [seek for seek in self._seeks if seek is not last and seek.call.began < until and _latest(seek) > begun]
        return last, later


def _highest(moves: list[Move]) -> tuple[int, Call | None]:
    best = max(moves, key=lambda move: move.offset, default=None)
    return (best.offset, best.call) if best is not None else (0, None)


def _behind(one: Span, other: Span) -> Span:
    return other if other[2] > one[2] else one


def _latest(seek: Move) -> float:
    return seek.call.ended if seek.call.outcome is Outcome.OK else seek.call.ended + _SEEK_SECONDS


def _higher(one: Move, other: Move) -> Move:
    return other if other.offset > one.offset else one


def _name(key: Key) -> str:
    return f"{key[1]} in {key[0]}"
