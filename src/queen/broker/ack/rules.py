"""The effect of acknowledgments on a cursor. Pure: the same rules for acks, batches and transactions.

`committed` is the first offset not consumed. Acking an offset as completed consumes everything up to it. A failure
that may be retried ends the lease and leaves the failed message as the next one to be delivered; how often that may
happen is decided once per request, so a batch that fails as a whole costs one retry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum


class AckStatus(StrEnum):
    COMPLETED = "completed"
    FAILED = "failed"
    RETRY = "retry"
    DLQ = "dlq"


def parse_status(text: str) -> AckStatus | None:
    """A status as clients send it; None when it is not one."""
    if text == "success":
        return AckStatus.COMPLETED
    try:
        return AckStatus(text)
    except ValueError:
        return None


INVALID_LEASE = "Invalid or expired lease"
NOT_FOUND = "Message not found"
UNRESOLVABLE = f"{NOT_FOUND}: the transactionId is unresolvable in this partition"
ALREADY_COMMITTED = "Message already committed: the group has consumed it, so it cannot be failed or retried"
NOT_APPLIED = "Not applied: an earlier message of the batch failed and is redelivered first"


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position of a group on a partition, and its lease."""

    committed: int
    lease_id: str | None = None
    lease_end: int = 0
    live: bool = False
    finished_lease_id: str | None = None
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Ack:
    """One acknowledgment whose message has been found at `offset`."""

    offset: int
    status: AckStatus
    lease_id: str = ""
    error: str = ""


@dataclass(slots=True)
class Outcome:
    """The result of one acknowledgment."""

    success: bool
    error: str | None = None
    released: bool = False
    dlq: bool = False
    noop: bool = False
    """It was consumed before, so the acknowledgment changed nothing."""


@dataclass(slots=True)
class Decision:
    """The cursor afterwards, and what else has to happen."""

    cursor: Cursor
    outcomes: list[Outcome] = field(default_factory=list)
    dead: list[tuple[int, str, int]] = field(default_factory=list)
    """(offset, error, retries) of messages that are given up on."""
    released: bool = False
    finished: bool = False
    wait: float = 0.0
    """Seconds before the next delivery."""


def decide(cursor: Cursor, acks: Sequence[Ack], *, retry_limit: int, retry_delay: float) -> Decision:
    """Apply acknowledgments of one partition and group, in order of their messages."""
    decision = Decision(cursor, [Outcome(False)] * len(acks))
    may_retry = cursor.attempts < retry_limit
    stopped = False
    for index in sorted(range(len(acks)), key=lambda i: acks[i].offset):
        ack = acks[index]
        if ack.lease_id and not _holds(cursor, ack):
            decision.outcomes[index] = _late(cursor, ack)
        elif _is_beyond(cursor, ack):
            decision.outcomes[index] = Outcome(False, UNRESOLVABLE)
        elif stopped:
            decision.outcomes[index] = _after_failure(ack)
        elif ack.status is AckStatus.COMPLETED:
            _consume(decision, ack.offset, completed=True)
            decision.outcomes[index] = Outcome(True, noop=ack.offset < cursor.committed)
        elif ack.offset < cursor.committed:
            decision.outcomes[index] = Outcome(False, ALREADY_COMMITTED)
        elif ack.status is AckStatus.RETRY:
            stopped = True
            _release(decision)
            decision.outcomes[index] = Outcome(True)
        elif ack.status is AckStatus.FAILED and may_retry:
            stopped = True
            _retry(decision, retry_delay)
            decision.outcomes[index] = Outcome(True)
        else:
            decision.dead.append((ack.offset, ack.error, cursor.attempts))
            _consume(decision, ack.offset, completed=False)
            if ack.status is AckStatus.FAILED:
                # As where it is retried: the consumer gives up the rest of the batch, which is delivered again.
                _release(decision)
            decision.outcomes[index] = Outcome(True, dlq=True)
    for outcome in decision.outcomes:
        outcome.released = decision.released if outcome.success else False
    return decision


def decide_in_transaction(cursor: Cursor, acks: Sequence[Ack]) -> Decision:
    """The same inside a transaction: a failure is final, nothing is retried, and the first error ends it all."""
    decision = Decision(cursor, [Outcome(False)] * len(acks))
    for index in sorted(range(len(acks)), key=lambda i: acks[i].offset):
        ack = acks[index]
        if ack.lease_id and not _holds(cursor, ack):
            decision.outcomes[index] = _late(cursor, ack)
        elif _is_beyond(cursor, ack):
            decision.outcomes[index] = Outcome(False, UNRESOLVABLE)
        elif ack.status is AckStatus.COMPLETED:
            _consume(decision, ack.offset, completed=True, reset=False)
            decision.outcomes[index] = Outcome(True)
        elif ack.offset < cursor.committed:
            decision.outcomes[index] = Outcome(False, ALREADY_COMMITTED)
        elif ack.status in (AckStatus.FAILED, AckStatus.DLQ):
            decision.dead.append((ack.offset, ack.error or "Unknown error", 0))
            _consume(decision, ack.offset, completed=False)
            _release(decision)
            decision.outcomes[index] = Outcome(True, dlq=True)
        else:
            decision.outcomes[index] = Outcome(False, "Unknown error")
    return decision


def decide_cycle(cursor: Cursor, ack: Ack, *, count: int, release: bool) -> Decision | None:
    """One acknowledgment for the `count` messages that a cycle has read. None: this cycle was applied before.

    A streaming client sorts what it was given by time and names the last; messages of one millisecond may then stand
    in another order than in the partition. If it has read as many as the lease holds, it has read them all.
    """
    decision = Decision(cursor, [Outcome(True)])
    if ack.lease_id:
        known = _holds(cursor, ack) or cursor.finished_lease_id == ack.lease_id
        if known and ack.status is AckStatus.COMPLETED and ack.offset < cursor.committed:
            return None
        if not _holds(cursor, ack):
            decision.outcomes = [Outcome(False, INVALID_LEASE)]
            return decision
        if _is_beyond(cursor, ack):
            decision.outcomes = [Outcome(False, UNRESOLVABLE)]
            return decision
    if ack.status is not AckStatus.COMPLETED:
        decision.dead.append((ack.offset, ack.error or "Unknown error", 0))
        _consume(decision, ack.offset, completed=False)
        _release(decision)
        decision.outcomes = [Outcome(True, released=True, dlq=True)]
        return decision
    upto = ack.offset + 1
    if ack.lease_id and count >= cursor.lease_end - cursor.committed:
        upto = max(upto, cursor.lease_end)
    decision.cursor = replace(cursor, committed=max(cursor.committed, upto))
    if release and cursor.lease_id is not None:
        decision.released = decision.finished = True
        decision.cursor = replace(decision.cursor, attempts=0)
    decision.outcomes = [Outcome(True, released=release)]
    return decision


def _holds(cursor: Cursor, ack: Ack) -> bool:
    return cursor.live and cursor.lease_id == ack.lease_id


def _is_beyond(cursor: Cursor, ack: Ack) -> bool:
    """Whether an ack names a lease, and a message behind it.

    What was delivered is not stored any more then, and its id was used again: the new message was never delivered.
    """
    return bool(ack.lease_id) and ack.offset >= cursor.lease_end


def _late(cursor: Cursor, ack: Ack) -> Outcome:
    """An ack that repeats what a finished lease already did is no error: its first answer may have been lost."""
    if ack.status is AckStatus.COMPLETED and cursor.finished_lease_id == ack.lease_id and ack.offset < cursor.committed:
        return Outcome(True, released=True, noop=True)
    return Outcome(False, INVALID_LEASE)


def _after_failure(ack: Ack) -> Outcome:
    if ack.status in (AckStatus.FAILED, AckStatus.RETRY):
        return Outcome(True)
    return Outcome(False, NOT_APPLIED)


def _consume(decision: Decision, offset: int, *, completed: bool, reset: bool = True) -> None:
    cursor = decision.cursor
    committed = max(cursor.committed, offset + 1)
    cursor = replace(cursor, committed=committed)
    if cursor.lease_id is not None and committed >= cursor.lease_end:
        decision.released = True
        decision.finished = True
    if decision.finished and completed and reset:
        cursor = replace(cursor, attempts=0)
    decision.cursor = cursor


def _release(decision: Decision) -> None:
    if decision.cursor.lease_id is not None:
        decision.released = True


def _retry(decision: Decision, delay: float) -> None:
    cursor = decision.cursor
    if cursor.lease_id is None:
        return
    decision.released = True
    decision.wait = delay
    if cursor.live:
        decision.cursor = replace(cursor, attempts=cursor.attempts + 1)
