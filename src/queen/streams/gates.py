"""Gates: a stateful function admits messages one by one."""

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
    """Second argument of a gate function; `state` is persistent per key."""

    state: Any
    stream_time_ms: int
    partition_id: str
    partition: str
    key: str

    def __getattr__(self, name: str) -> Any:
        """camelCase aliases, as in the JavaScript SDK."""
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
        decision = await call(self._function, value, context)
        if isinstance(decision, Mapping):
            decision = decision.get("allow")
        if not isinstance(decision, bool):
            raise TypeError("the function of .gate() must return a bool or {'allow': bool}")
        return decision


@dataclass(slots=True)
class Passed:
    """Result of a gate for a batch."""

    outcome: Outcome = field(default_factory=Outcome)
    allowed: int = 0
    denied: int = 0
    stopped_at: int | None = None
    """Index in the batch of the first denied message; None if all were admitted."""


async def pass_gate(
    gate: Gate, rows: Rows, records: Sequence[Record], *, now_ms: int, partition_id: str, partition: str
) -> Passed:
    """Call the gate for each message until it denies one: that one and the rest are redelivered."""
    passed = Passed()
    states: dict[str, Any] = {}
    touched: dict[str, None] = {}
    for index, group in groupby(records, key=lambda record: record.index):
        # All values of one message are admitted together, or none.
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
