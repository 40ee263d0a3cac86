"""Gates: letting messages through one by one, as long as a function with a memory allows it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from queen.streams.operators import Operator, UserFunction, call
from queen.streams.records import Emit, Outcome, Record, Rows

_ALIASES = {"streamTimeMs": "stream_time_ms", "partitionId": "partition_id"}


@dataclass(slots=True)
class GateContext:
    """What a gate is told beside the value. What it writes to `state` it finds there the next time for this key."""

    state: Any
    stream_time_ms: int
    partition_id: str
    partition: str
    key: str

    def __getattr__(self, name: str) -> Any:
        """The names that JavaScript has for them."""
        if name not in _ALIASES:
            raise AttributeError(f"a gate's context has no {name!r}")
        return getattr(self, _ALIASES[name])


class Gate(Operator):
    kind = "gate"

    def __init__(self, function: UserFunction) -> None:
        if not callable(function):
            raise TypeError(f".gate() requires a function, not {function!r}")
        self._function = function

    async def allows(self, value: Any, context: GateContext) -> bool:
        answer = await call(self._function, value, context)
        if isinstance(answer, Mapping):
            answer = answer.get("allow")
        if not isinstance(answer, bool):
            raise TypeError("the function of .gate() must return a bool or {'allow': bool}")
        return answer


@dataclass(slots=True)
class Passed:
    """How far a gate let a batch through."""

    outcome: Outcome = field(default_factory=Outcome)
    allowed: int = 0
    denied: int = 0
    stopped_at: int | None = None
    """The place in the batch of the first message that was not let through; None when all were."""


async def pass_gate(
    gate: Gate, rows: Rows, records: Sequence[Record], *, now_ms: int, partition_id: str, partition: str
) -> Passed:
    """Ask the gate for one message after the other, until it denies one: that one and the rest come again later."""
    passed = Passed()
    states: dict[str, Any] = {}
    touched: dict[str, None] = {}
    for index, group in groupby(records, key=lambda record: record.index):
        # A message that was made several values of goes through with all of them, or not at all.
        together = list(group)
        before = {record.key: copy.deepcopy(states.get(record.key, _stored(rows, record.key))) for record in together}
        for record in together:
            state = states.setdefault(record.key, copy.deepcopy(before[record.key]))
            context = GateContext(state, now_ms, partition_id, partition, record.key)
            if not await gate.allows(record.value, context):
                states |= before
                passed.stopped_at = index
                break
            states[record.key] = context.state
        if passed.stopped_at is not None:
            break
        touched |= dict.fromkeys(before)
        passed.allowed += len(together)
        passed.outcome.emits += [Emit(record.key, record.value) for record in together]
    passed.denied = len(records) - passed.allowed
    for key in touched:
        stored = rows.get(key)
        passed.outcome.upsert(key, states[key], stored.version if stored else None)
    return passed


def _stored(rows: Rows, key: str) -> Any:
    row = rows.get(key)
    return {} if row is None or row.value is None else row.value
