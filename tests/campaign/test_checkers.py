"""The checkers of the campaign find what they are for: small histories, each with something that must not be."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.campaign.batch_checks import Batches, check_batches
from tests.campaign.dead_letter_checks import DeadLetters, check_dead_letters
from tests.campaign.faults import KINDS, Lane, lanes, lanes_of, schedule, storm_schedule
from tests.campaign.history import Call, History, Outcome, Violation
from tests.campaign.log_checks import Log, LogChecker, Message, Rules
from tests.campaign.report import Totals
from tests.campaign.rounds import WORKLOADS, choose_workloads, odd_answers
from tests.campaign.topic_checks import TopicChecker, TopicRules, TopicState
from tests.campaign.transaction_checks import Transactions, check_transactions
from tests.campaign.workloads.spark import compare
from tests.campaign.workloads.streams import check_counts

OK, FAIL, UNKNOWN = Outcome.OK, Outcome.FAIL, Outcome.UNKNOWN
LEASE = 2.0


class Script:
    """A history that is written by hand. Calls take a tenth of a second, and follow each other unless told."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def add(
        self, op: str, args: dict[str, Any], answer: Any = None, outcome: Outcome = OK, at: float | None = None
    ) -> Call:
        began = at if at is not None else (self.calls[-1].ended + 0.1 if self.calls else 1.0)
        call = Call(len(self.calls), "w/c", op, args, began, began + 0.1, outcome, answer if outcome is OK else None)
        self.calls.append(call)
        return call

    def push(
        self, *ids: str, status: str = "queued", outcome: Outcome = OK, at: float | None = None, host: str = "h"
    ) -> Call:
        items = [["p", id] for id in ids]
        return self.add("push", {"items": items, "host": host}, [[status, f"m-{id}"] for id in ids], outcome, at)

    def pop(self, *ids: str, lease: str = "l", group: str = "g", at: float | None = None) -> Call:
        answer = {"lease": lease, "messages": [["p", id] for id in ids]} if ids else None
        return self.add("pop", {"group": group}, answer, at=at)

    def ack(self, *ids: str, lease: str = "l", outcome: Outcome = OK, group: str = "g", success: bool = True) -> Call:
        args = {"group": group, "lease": lease, "messages": [["p", id] for id in ids], "status": "completed"}
        return self.add("ack", args, [[success, False]] * len(ids), outcome)

    def seek(self, offset: int, group: str = "g", outcome: Outcome = OK) -> Call:
        return self.add("seek", {"group": group, "partition": "p", "offset": offset}, {}, outcome)

    def check_log(self, *stored: str, **rules: Any) -> list[str]:
        log = Log({"p": [Message(offset, f"m-{id}", id) for offset, id in enumerate(stored)]})
        return kinds(LogChecker(self.calls, log, Rules("w", LEASE, **{"drained": False} | rules)).check())


def kinds(violations: list[Violation]) -> list[str]:
    return [violation.kind for violation in violations]


@pytest.fixture
def script() -> Script:
    return Script()


# The log.


def test_a_history_in_which_all_is_well_has_no_violation(script: Script) -> None:
    script.push("a", "b")
    script.push("c", outcome=UNKNOWN)
    script.push("c", status="duplicate")
    script.push("d", status="buffered")
    script.pop("a", "b")
    script.ack("a", "b")
    script.pop("c", lease="l2")
    script.ack("c", lease="l2", outcome=UNKNOWN)
    script.pop("d", lease="l3")
    assert script.check_log("a", "b", "c", "d") == []


def test_a_message_that_was_answered_and_is_nowhere_is_lost(script: Script) -> None:
    script.push("a")
    script.push("b", status="buffered")
    script.pop("a")
    assert script.check_log("a") == ["lost"]


def test_a_message_of_unknown_outcome_may_be_missing_but_a_refused_one_may_not_be_there(script: Script) -> None:
    script.push("a", outcome=UNKNOWN)
    script.push("b", outcome=FAIL)
    assert script.check_log("b", complete=False) == ["stored though refused"]


def test_a_message_that_is_stored_twice_is_found_unless_its_id_was_forgotten(script: Script) -> None:
    script.push("a", outcome=UNKNOWN)
    script.push("a")
    assert script.check_log("a", "a", complete=False) == ["stored twice"]
    assert script.check_log("a", "a", complete=False, dedup=False) == []


def test_two_producers_that_both_stored_the_same_id_are_found(script: Script) -> None:
    script.push("a")
    script.push("a")
    assert script.check_log("a", complete=False) == ["queued twice"]


def test_an_answer_that_names_another_message_is_found(script: Script) -> None:
    script.push("a")
    script.calls[0].answer = [["queued", "m-other"]]
    assert script.check_log("a", complete=False) == ["another id"]


def test_what_was_sent_later_is_behind_what_was_answered_before_on_the_same_host(script: Script) -> None:
    script.push("a")
    script.push("b")
    assert script.check_log("b", "a", complete=False) == ["reordered"]


def test_what_was_spooled_may_be_behind_what_came_later_where_that_is_not_promised(script: Script) -> None:
    script.push("a", status="buffered")
    script.push("b")
    assert script.check_log("b", "a", complete=False) == ["reordered"]
    assert script.check_log("b", "a", complete=False, spooled_in_order=False) == []


def test_pushes_at_the_same_time_or_on_two_hosts_may_be_in_any_order(script: Script) -> None:
    script.push("a", at=1.0)
    script.push("b", at=1.05)
    script.push("c", host="other")
    assert script.check_log("c", "b", "a", complete=False) == []


def test_a_batch_with_a_gap_is_found(script: Script) -> None:
    script.push("a", "b", "c")
    script.pop("a", "c")
    assert script.check_log("a", "b", "c", complete=False) == ["reordered"]


def test_a_message_that_comes_again_after_its_ack_is_found(script: Script) -> None:
    script.push("a", "b")
    script.pop("a", "b")
    script.ack("a", "b")
    script.pop("b", lease="l2")
    assert script.check_log("a", "b") == ["doubled after its ack"]


def test_a_message_may_come_again_when_its_ack_is_unknown_or_failed(script: Script) -> None:
    script.push("a")
    script.pop("a")
    script.ack("a", outcome=UNKNOWN)
    script.pop("a", lease="l2")
    script.ack("a", lease="l2", success=False)
    script.pop("a", lease="l3", at=9.0)
    assert script.check_log("a") == []


def test_a_group_that_skips_a_message_is_found(script: Script) -> None:
    script.push("a", "b")
    script.pop("b")
    assert script.check_log("a", "b") == ["skipped", "never delivered"]


def test_a_group_that_is_given_nothing_at_all_is_found(script: Script) -> None:
    script.push("a")
    script.pop("a")
    script.ack("a")
    script.pop(group="other")
    assert script.check_log("a") == ["never delivered"]


def test_what_was_given_last_and_not_acked_comes_again(script: Script) -> None:
    script.push("a", "b")
    script.pop("a", "b")
    script.ack("a")
    assert script.check_log("a", "b", drained=True) == ["not delivered again"]
    late = script.ack("b", success=False)
    assert script.check_log("a", "b", drained=True) == ["not delivered again"]
    late.outcome = UNKNOWN
    assert script.check_log("a", "b", drained=True) == []
    script.seek(0)
    assert script.check_log("a", "b", drained=True) == ["not delivered again"]
    script.pop("a", "b", lease="l2")
    script.ack("a", "b", lease="l2")
    assert script.check_log("a", "b", drained=True) == []


def test_two_consumers_with_the_same_messages_at_once_are_found(script: Script) -> None:
    script.push("a")
    script.pop("a", lease="one")
    script.pop("a", lease="two")
    assert script.check_log("a") == ["two leases"]
    assert script.check_log("a", releases=True) == []


def test_a_lease_that_has_expired_may_be_followed_by_another(script: Script) -> None:
    script.push("a")
    first = script.pop("a", lease="one")
    script.pop("a", lease="two", at=first.began + LEASE)
    assert script.check_log("a") == []


def test_a_gap_in_the_offsets_is_found(script: Script) -> None:
    script.push("a", "b")
    log = Log({"p": [Message(0, "m-a", "a"), Message(2, "m-b", "b")]})
    assert kinds(LogChecker(script.calls, log, Rules("w", complete=False)).check()) == ["gap"]


def test_a_group_reads_on_from_where_it_was_put(script: Script) -> None:
    script.push("a", "b", "c")
    script.pop("a", "b")
    script.ack("a", "b")
    script.seek(1)
    script.pop("b", "c", lease="l2")
    assert script.check_log("a", "b", "c", releases=True) == []
    script.calls[-1].answer = {"lease": "l2", "messages": [["p", "c"]]}
    assert script.check_log("a", "b", "c", releases=True) == ["skipped"]
    script.calls[-1].answer = {"lease": "l2", "messages": [["p", "a"], ["p", "b"], ["p", "c"]]}
    assert script.check_log("a", "b", "c", releases=True) == ["doubled after its ack"]


def test_a_seek_of_unknown_outcome_may_have_happened_or_not(script: Script) -> None:
    script.push("a", "b")
    script.pop("a")
    script.ack("a")
    script.seek(0, outcome=UNKNOWN)
    script.pop("b", lease="l2")
    script.pop("a", lease="l3")
    assert script.check_log("a", "b", releases=True) == []


# Transactions.


def transact(
    script: Script, name: str, of: list[str] | None = None, outcome: Outcome = OK, success: bool = True
) -> Call:
    return script.add("transact", {"name": name, "of": of}, {"success": success}, outcome)


def check_sides(
    script: Script, left: list[str], right: list[str], source: set[tuple[str, str]] | None = None
) -> list[str]:
    return kinds(check_transactions("w", script.calls, Transactions(source or set(), {"left": left, "right": right})))


def test_half_a_transaction_is_found(script: Script) -> None:
    transact(script, "t", outcome=UNKNOWN)
    assert check_sides(script, ["t"], []) == ["half a transaction"]
    assert check_sides(script, ["t"], ["t"]) == check_sides(script, [], []) == []


def test_a_transaction_that_was_answered_is_there_and_a_refused_one_is_not(script: Script) -> None:
    transact(script, "done")
    transact(script, "refused", success=False)
    assert check_sides(script, ["refused"], ["refused"]) == ["lost", "stored though refused"]


def test_a_message_from_which_two_transactions_were_made_is_doubled(script: Script) -> None:
    transact(script, "one", ["p", "a"], outcome=UNKNOWN)
    transact(script, "two", ["p", "a"])
    both = ["one", "two"]
    assert check_sides(script, both, both, {("p", "a")}) == ["doubled"]
    assert check_sides(script, ["two"], ["two"], {("p", "a")}) == []
    assert check_sides(script, ["two"], ["two"], {("p", "a"), ("p", "b")}) == ["lost"]


def test_two_transactions_that_are_in_different_orders_are_not_serialisable(script: Script) -> None:
    script.add("transact", {"name": "one", "of": None}, {"success": True}, at=1.0)
    script.add("transact", {"name": "two", "of": None}, {"success": True}, at=1.0)
    assert check_sides(script, ["one", "two"], ["two", "one"]) == ["not serialisable"]
    assert check_sides(script, ["two", "one"], ["two", "one"]) == []


def test_a_transaction_before_one_that_had_ended_is_not_serialisable(script: Script) -> None:
    transact(script, "one")
    transact(script, "two")
    assert check_sides(script, ["two", "one"], ["two", "one"]) == ["not serialisable"]


# Dead letters.


def fail(script: Script, id: str, dead: bool = True) -> None:
    args = {"group": "g", "lease": "l", "messages": [["p", id]], "status": "failed"}
    script.add("ack", args, [[True, dead]])


@pytest.mark.parametrize(
    ("stored", "dead", "expected"),
    [
        (["a"], ["a"], []),
        (["a", "a:retry-1"], [], []),
        (["a"], [], ["lost dead letter", "never done"]),
        (["a", "a:retry-1"], ["a"], ["doubled"]),
        (["a", "a:retry-1", "a:retry-2"], [], ["doubled"]),
        ([], [], ["lost"]),
    ],
)
def test_a_message_that_failed_is_dead_or_went_round_again(
    script: Script, stored: list[str], dead: list[str], expected: list[str]
) -> None:
    script.push("a")
    fail(script, "a")
    script.ack("a:retry-1", "a:retry-2")
    assert kinds(check_dead_letters("w", script.calls, DeadLetters(stored, dead))) == expected


def test_a_message_that_never_failed_is_not_dead(script: Script) -> None:
    script.push("a")
    script.ack("a")
    found = check_dead_letters("w", script.calls, DeadLetters(["a"], ["a"]))
    assert kinds(found) == ["dead without having failed"]


# Topics.


def enqueue(script: Script, *items: tuple[int, str, int, float], keyed: bool = True) -> Call:
    args = {"items": [[name, priority, delay, keyed] for _, name, priority, delay in items]}
    return script.add("enqueue", args, [id for id, *_ in items])


def dequeue(script: Script, *items: tuple[int, str, int], owner: str = "o", at: float | None = None) -> Call:
    answer = {"owner": owner, "items": [list(item) for item in items]} if items else None
    return script.add("dequeue", {}, answer, at=at)


def settle(script: Script, how: str, *ids: int, owner: str = "o", success: bool = True) -> Call:
    return script.add(how, {"owner": owner, "ids": list(ids)}, [success] * len(ids))


def check_topic(
    script: Script,
    left: set[int] | None = None,
    strict: bool = True,
    drained: bool = False,
    dead: set[int] | None = None,
) -> list[str]:
    state = TopicState(left or set(), dead or set())
    return kinds(TopicChecker(script.calls, state, TopicRules("w", LEASE, strict, drained)).check())


def test_a_topic_in_which_all_is_well_has_no_violation(script: Script) -> None:
    enqueue(script, (1, "a", 0, 0), (2, "b", 1, 0))
    dequeue(script, (1, "a", 0), (2, "b", 1))
    settle(script, "nack", 1)
    settle(script, "ack", 2)
    dequeue(script, (1, "a", 0), owner="other")
    settle(script, "ack", 1, owner="other")
    assert check_topic(script) == []


def test_an_item_that_is_nowhere_is_lost_and_one_that_is_left_was_never_delivered(script: Script) -> None:
    enqueue(script, (1, "a", 0, 0), (2, "b", 0, 0))
    assert check_topic(script, {2}) == ["lost", "never delivered"]


def test_an_item_after_its_ack_is_found(script: Script) -> None:
    enqueue(script, (1, "a", 0, 0))
    dequeue(script, (1, "a", 0))
    settle(script, "ack", 1)
    dequeue(script, (1, "a", 0), owner="other")
    assert check_topic(script, {1}) == ["there after its ack", "doubled after its ack"]


def test_an_item_that_was_given_and_not_acked_comes_again_or_is_dead(script: Script) -> None:
    enqueue(script, (1, "a", 0, 0), (2, "b", 0, 0))
    dequeue(script, (1, "a", 0), (2, "b", 0))
    settle(script, "ack", 1)
    late = settle(script, "ack", 2, success=False)
    assert check_topic(script, drained=True) == ["lost"]
    assert check_topic(script, {2}, drained=True) == ["not delivered again"]
    assert check_topic(script, dead={2}, drained=True) == []
    late.outcome = UNKNOWN
    assert check_topic(script, drained=True) == []


def test_an_item_that_two_hold_is_found(script: Script) -> None:
    enqueue(script, (1, "a", 0, 0))
    first = dequeue(script, (1, "a", 0))
    dequeue(script, (1, "a", 0), owner="other")
    assert check_topic(script) == ["two leases"]
    script.calls.pop()
    dequeue(script, (1, "a", 0), owner="other", at=first.began + LEASE)
    assert check_topic(script) == []


def test_an_item_before_its_time_is_found(script: Script) -> None:
    enqueue(script, (1, "a", 0, 5))
    dequeue(script, (1, "a", 0))
    assert check_topic(script) == ["too early"]


def test_an_item_that_overtakes_a_more_urgent_one_is_found(script: Script) -> None:
    enqueue(script, (1, "urgent", 0, 0), (2, "idle", 3, 0))
    dequeue(script, (2, "idle", 3), at=5.0)
    dequeue(script, (1, "urgent", 0))
    assert check_topic(script) == ["overtaken"]
    assert check_topic(script, strict=False) == []


def test_an_item_that_was_not_due_yet_may_be_overtaken(script: Script) -> None:
    enqueue(script, (1, "later", 0, 3.95), (2, "idle", 3, 0))
    dequeue(script, (2, "idle", 3), at=5.0)
    dequeue(script, (1, "later", 0))
    assert check_topic(script) == []


def test_an_answer_that_is_out_of_order_is_found(script: Script) -> None:
    enqueue(script, (1, "a", 0, 0), (2, "b", 1, 0))
    dequeue(script, (2, "b", 1), (1, "a", 0))
    assert check_topic(script) == ["reordered"]


def test_a_key_with_two_items_and_an_id_with_two_names_are_found(script: Script) -> None:
    enqueue(script, (1, "a", 0, 0))
    enqueue(script, (2, "a", 0, 0))
    enqueue(script, (2, "b", 0, 0))
    dequeue(script, (1, "a", 0), (2, "a", 0))
    assert check_topic(script) == ["a key twice", "an id twice"]


# Streams, and the campaign as a whole.


def test_windows_that_were_counted_twice_or_not_at_all_are_found() -> None:
    came_in = Counter({("a", 0): 10, ("b", 0): 10, ("c", 0): 10})
    assert check_counts("w", came_in, came_in) == []
    came_out = Counter({("a", 0): 20, ("c", 0): 10})
    assert kinds(check_counts("w", came_in, came_out)) == ["counted twice", "counted too little"]


def test_answers_that_no_fault_excuses_are_found() -> None:
    history = History()
    for error in ("500 oh", "503 later", "429 slowly", "400 what", "ServerDisconnectedError"):
        history.end(history.begin("w/c", "push", {}), Outcome.UNKNOWN, error=error)
    assert kinds(odd_answers(history.calls)) == ["status 500", "status 400"]


def test_a_violation_shows_the_calls_that_matter_and_no_others(script: Script) -> None:
    script.push("a", "b")
    script.push("unrelated")
    script.pop("a", "b")
    script.ack("a", "b")
    script.pop("b", lease="l2")
    log = Log({"p": [Message(offset, f"m-{id}", id) for offset, id in enumerate(("a", "b", "unrelated"))]})
    rules = Rules("w", LEASE, complete=False, drained=False)
    (violation,) = LogChecker(script.calls, log, rules).check()
    assert [call.op for call in violation.calls] == ["push", "ack", "pop"]
    assert "unrelated" not in str(violation)
    assert len(str(violation).splitlines()) == 4


def test_a_seed_decides_the_faults_and_the_workloads() -> None:
    def first(seed: int) -> list[Any]:
        faults = schedule(seed, list(KINDS), 1.0)
        return [next(faults) for _ in range(1000)]

    assert first(1) == first(1)
    assert first(1) != first(2)
    assert {fault.kind for fault in first(3)} == set(KINDS)
    chosen = [choose_workloads(seed, list(WORKLOADS)) for seed in range(100)]
    assert chosen == [choose_workloads(seed, list(WORKLOADS)) for seed in range(100)]
    assert {name for names in chosen for name in names} == set(WORKLOADS) - {"spark"}


def test_a_storm_harms_everything_at_once_and_each_thing_by_its_own_seed() -> None:
    all_lanes = lanes(list(KINDS), hosts=2)
    assert {Lane("hosts", 0), Lane("hosts", 1), Lane("postgres"), Lane("packets", 1)} <= set(all_lanes)
    assert {lane.harms for lane in all_lanes} == {kind.harms for kind in KINDS.values()}

    def first(seed: int, lane: Lane) -> list[Any]:
        return list(islice(storm_schedule(seed, lane, list(KINDS), 1.0), 500))

    for lane in all_lanes:
        faults = first(1, lane)
        assert {fault.kind for fault in faults} == {name for name, kind in KINDS.items() if kind.harms == lane.harms}
        assert {fault.target for fault in faults} == {lane.target}
        assert faults == first(1, lane) != first(2, lane)
    assert lanes_of("disks-full", 1, hosts=2) == [Lane("disks"), Lane("postgres")]
    assert lanes_of("worker-kill", 7, hosts=2) == [Lane("hosts", 1)]


def test_totals_are_the_same_after_they_were_saved(tmp_path: Path) -> None:
    totals = Totals(
        2, Counter({"failover": 3}), Counter({"failover": 1}), Counter({("push", OK): 4}), Counter({"log": 2})
    )
    totals.recoveries["failover"] = [0.5, 1.0]
    totals.violations.append("log: lost: a")
    totals.save(tmp_path / "saved.json")
    assert Totals.load(tmp_path / "saved.json") == totals
    assert "3 faults in 2 rounds, 1 of them in storms" in totals.text()


def batches(*stored: str, second: Outcome = OK) -> list[str]:
    """Two batches of two rows each, the first of which was answered."""
    script = Script()
    script.add("publish", {"batch": 0, "rows": [2]})
    script.add("publish", {"batch": 1, "rows": [2]}, outcome=second)
    wanted = {batch: {"p": [f"{batch}/0/0", f"{batch}/0/1"]} for batch in (0, 1)}
    return kinds(check_batches("w", script.calls, Batches(wanted, {"p": stored})))


def test_batches_are_there_as_a_whole_once_and_in_order() -> None:
    whole = ("0/0/0", "0/0/1", "1/0/0", "1/0/1")
    assert batches(*whole) == []
    assert batches(*whole[:2], second=UNKNOWN) == []
    assert batches(*whole[:2]) == ["lost"]
    assert batches(*whole[:3], second=UNKNOWN) == ["half a batch"]
    assert batches(*whole, whole[0]) == ["doubled"]
    assert batches(*whole[2:], *whole[:2]) == ["reordered"]


def test_what_passes_through_a_query_comes_out_as_it_went_in() -> None:
    came_in = {"p": ["a", "b", "c"]}
    assert compare("w", came_in, {"p": ["a", "b", "c"]}) == []
    assert kinds(compare("w", came_in, {"p": ["a", "c"]})) == ["lost"]
    assert kinds(compare("w", came_in, {})) == ["lost"]
    assert kinds(compare("w", came_in, {"p": ["a", "b", "b", "c"]})) == ["doubled"]
    assert kinds(compare("w", came_in, {"p": ["b", "a", "c"]})) == ["reordered"]
