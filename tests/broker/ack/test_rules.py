"""What acknowledgments do to a cursor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queen.broker.ack.rules import (
    ALREADY_COMMITTED,
    INVALID_LEASE,
    NOT_APPLIED,
    Ack,
    AckStatus,
    Cursor,
    Decision,
    decide,
    decide_in_transaction,
    parse_status,
)

COMPLETED, FAILED, RETRY, DLQ = AckStatus.COMPLETED, AckStatus.FAILED, AckStatus.RETRY, AckStatus.DLQ
LEASED = Cursor(committed=10, lease_id="L", lease_end=13, live=True)


def run(cursor: Cursor, *acks: Ack, retry_limit: int = 3, retry_delay: float = 1.0) -> Decision:
    return decide(cursor, acks, retry_limit=retry_limit, retry_delay=retry_delay)


def batch(*statuses: AckStatus, start: int = 10, lease: str = "L") -> list[Ack]:
    return [Ack(start + index, status, lease, "why") for index, status in enumerate(statuses)]


def test_a_whole_batch_completed_ends_the_lease_and_forgets_the_attempts() -> None:
    cursor = Cursor(committed=10, lease_id="L", lease_end=13, live=True, attempts=2)
    decision = run(cursor, *batch(COMPLETED, COMPLETED, COMPLETED))
    assert decision.cursor.committed == 13
    assert decision.cursor.attempts == 0
    assert decision.released
    assert decision.finished
    assert [outcome.released for outcome in decision.outcomes] == [True, True, True]


def test_a_completed_prefix_moves_the_cursor_and_keeps_the_lease() -> None:
    decision = run(LEASED, *batch(COMPLETED, COMPLETED))
    assert decision.cursor.committed == 12
    assert not decision.released
    assert not decision.finished


def test_acks_are_applied_in_order_of_their_messages_and_answered_in_order_of_the_request() -> None:
    decision = run(LEASED, Ack(12, DLQ, "L"), Ack(10, COMPLETED, "L"), Ack(11, COMPLETED, "L"))
    assert decision.cursor.committed == 13
    assert [outcome.dlq for outcome in decision.outcomes] == [True, False, False]


def test_a_failure_in_the_middle_consumes_what_is_before_it_and_nothing_after() -> None:
    decision = run(LEASED, *batch(COMPLETED, FAILED, COMPLETED))
    assert decision.cursor.committed == 11
    assert decision.cursor.attempts == 1
    assert decision.released
    assert decision.wait == 1.0
    assert [outcome.success for outcome in decision.outcomes] == [True, True, False]
    assert decision.outcomes[2].error == NOT_APPLIED
    assert decision.dead == []


def test_a_batch_that_fails_as_a_whole_costs_one_retry() -> None:
    decision = run(LEASED, *batch(FAILED, FAILED, FAILED))
    assert decision.cursor.attempts == 1
    assert decision.cursor.committed == 10
    assert all(outcome.success and not outcome.dlq for outcome in decision.outcomes)


def test_a_batch_at_its_last_retry_is_redelivered_whole_and_then_given_up_whole() -> None:
    last = Cursor(committed=10, lease_id="L", lease_end=13, live=True, attempts=1)
    decision = run(last, *batch(FAILED, FAILED, FAILED), retry_limit=2)
    assert decision.cursor.committed == 10
    assert decision.dead == []
    spent = Cursor(committed=10, lease_id="L", lease_end=13, live=True, attempts=decision.cursor.attempts)
    decision = run(spent, *batch(FAILED, FAILED, FAILED), retry_limit=2)
    assert decision.cursor.committed == 13
    assert decision.dead == [(10, "why", 2), (11, "why", 2), (12, "why", 2)]
    assert [outcome.dlq for outcome in decision.outcomes] == [True, True, True]


def test_without_retries_the_first_failure_is_given_up_on() -> None:
    decision = run(LEASED, *batch(FAILED, COMPLETED, COMPLETED), retry_limit=0)
    assert decision.dead == [(10, "why", 0)]
    assert decision.cursor.committed == 13
    assert decision.finished


def test_the_attempts_stay_when_the_last_message_of_a_batch_is_given_up_on() -> None:
    spent = Cursor(committed=10, lease_id="L", lease_end=11, live=True, attempts=2)
    decision = run(spent, *batch(FAILED), retry_limit=2)
    assert decision.cursor.attempts == 2
    assert decision.finished


def test_dlq_gives_up_at_once() -> None:
    decision = run(LEASED, *batch(COMPLETED, DLQ))
    assert decision.dead == [(11, "why", 0)]
    assert decision.cursor.committed == 12
    assert not decision.released


def test_retry_ends_the_lease_and_counts_nothing() -> None:
    decision = run(LEASED, *batch(COMPLETED, RETRY, COMPLETED))
    assert decision.cursor.committed == 11
    assert decision.cursor.attempts == 0
    assert decision.released
    assert not decision.finished
    assert decision.wait == 0.0


@pytest.mark.parametrize("status", list(AckStatus))
def test_another_lease_changes_nothing(status: AckStatus) -> None:
    decision = run(LEASED, Ack(10, status, "other"))
    assert decision.cursor == LEASED
    assert not decision.released
    assert decision.outcomes[0].error == INVALID_LEASE


def test_an_expired_lease_changes_nothing() -> None:
    expired = Cursor(committed=10, lease_id="L", lease_end=13, live=False)
    decision = run(expired, *batch(COMPLETED, FAILED))
    assert decision.cursor == expired
    assert [outcome.error for outcome in decision.outcomes] == [INVALID_LEASE, INVALID_LEASE]


def test_a_repeated_ack_of_a_finished_lease_succeeds_again() -> None:
    done = Cursor(committed=13, finished_lease_id="L")
    decision = run(done, *batch(COMPLETED, COMPLETED, COMPLETED))
    assert all(outcome.success for outcome in decision.outcomes)
    assert decision.cursor == done


def test_a_failure_of_a_finished_lease_comes_too_late() -> None:
    decision = run(Cursor(committed=13, finished_lease_id="L"), Ack(12, FAILED, "L"))
    assert decision.outcomes[0].error == INVALID_LEASE
    assert decision.dead == []


def test_without_a_lease_id_any_message_can_be_acked_and_the_cursor_never_goes_back() -> None:
    cursor = Cursor(committed=10)
    assert run(cursor, Ack(19, COMPLETED)).cursor.committed == 20
    assert run(cursor, Ack(3, COMPLETED)).cursor.committed == 10


def test_an_ack_without_a_lease_id_that_reaches_the_end_of_the_lease_ends_it() -> None:
    assert run(LEASED, Ack(12, COMPLETED)).finished
    assert not run(LEASED, Ack(11, COMPLETED)).finished


@pytest.mark.parametrize("status", [FAILED, RETRY, DLQ])
@pytest.mark.parametrize("lease", ["", "L"])
def test_a_failure_of_a_message_already_consumed_is_refused(status: AckStatus, lease: str) -> None:
    decision = run(LEASED, Ack(5, status, lease, "late"))
    assert (decision.outcomes[0].success, decision.outcomes[0].error) == (False, ALREADY_COMMITTED)
    assert (decision.cursor, decision.dead, decision.released) == (LEASED, [], False)


def test_a_completed_ack_says_whether_it_changed_anything() -> None:
    decision = run(LEASED, Ack(9, COMPLETED, "L"), Ack(10, COMPLETED, "L"))
    assert [(outcome.success, outcome.noop) for outcome in decision.outcomes] == [(True, True), (True, False)]


def test_a_failure_that_is_given_up_on_ends_the_lease_as_one_that_is_retried_does() -> None:
    decision = run(LEASED, Ack(10, FAILED, "L", "why"), retry_limit=0)
    assert (decision.cursor.committed, decision.released, decision.finished) == (11, True, False)
    assert decision.outcomes[0].released


def test_in_a_transaction_a_failure_of_a_message_already_consumed_is_an_error() -> None:
    assert decide_in_transaction(LEASED, [Ack(5, FAILED, "L")]).outcomes[0].error == ALREADY_COMMITTED


def test_in_a_transaction_a_failure_is_final() -> None:
    decision = decide_in_transaction(LEASED, batch(COMPLETED, FAILED))
    assert decision.dead == [(11, "why", 0)]
    assert decision.cursor.committed == 12
    assert decision.released


def test_in_a_transaction_a_retry_is_an_error() -> None:
    assert not decide_in_transaction(LEASED, batch(RETRY)).outcomes[0].success


@pytest.mark.parametrize(
    ("text", "expected"),
    [("completed", COMPLETED), ("success", COMPLETED), ("failed", FAILED), ("retry", RETRY), ("dlq", DLQ)],
)
def test_a_status_is_known_by_its_name(text: str, expected: AckStatus) -> None:
    assert parse_status(text) is expected


@pytest.mark.parametrize("text", ["", "COMPLETED", "done", " completed"])
def test_an_unknown_status_is_none(text: str) -> None:
    assert parse_status(text) is None


cursors = st.builds(
    Cursor,
    committed=st.integers(0, 20),
    lease_id=st.sampled_from([None, "L"]),
    lease_end=st.integers(0, 25),
    live=st.booleans(),
    finished_lease_id=st.sampled_from([None, "F"]),
    attempts=st.integers(0, 4),
)
acks = st.lists(
    st.builds(Ack, st.integers(0, 24), st.sampled_from(list(AckStatus)), st.sampled_from(["", "L", "F", "other"])),
    min_size=1,
    max_size=8,
)


@given(cursors, acks, st.integers(0, 4))
def test_whatever_is_acked_nothing_is_lost_and_nothing_comes_back(
    cursor: Cursor, several: list[Ack], retry_limit: int
) -> None:
    decision = run(cursor, *several, retry_limit=retry_limit)
    after = decision.cursor.committed
    assert after >= cursor.committed
    assert len(decision.outcomes) == len(several)
    dead = {offset for offset, _, _ in decision.dead}
    applied = [
        ack
        for ack, outcome in zip(several, decision.outcomes, strict=True)
        if outcome.success and (not ack.lease_id or (cursor.live and ack.lease_id == cursor.lease_id))
    ]
    for ack in applied:
        if ack.status is COMPLETED:
            assert ack.offset < after
        elif ack.status in (FAILED, RETRY) and ack.offset not in dead:
            # What is to be tried again is not passed over by anything in the same request.
            consumed_before = ack.offset < cursor.committed
            repeated = any(one.offset == ack.offset and one.status in (COMPLETED, DLQ) for one in applied)
            assert ack.offset >= after or consumed_before or repeated
    if after > cursor.committed:
        # The cursor stops right after a message that was acked or given up on, never anywhere else.
        assert after - 1 in {ack.offset for ack in applied if ack.status is COMPLETED} | dead
    if not decision.released:
        assert decision.wait == 0.0
    if decision.finished:
        assert decision.released
        assert after >= cursor.lease_end


@given(cursors, acks)
def test_in_a_transaction_too_the_cursor_moves_forward_only(cursor: Cursor, several: list[Ack]) -> None:
    decision = decide_in_transaction(cursor, several)
    assert decision.cursor.committed >= cursor.committed
    for ack, outcome in zip(several, decision.outcomes, strict=True):
        if outcome.success and ack.status is not RETRY:
            assert ack.offset < decision.cursor.committed
