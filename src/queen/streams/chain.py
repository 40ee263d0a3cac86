"""Compiles a chain of operators into stages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto

from queen.streams.gates import Gate
from queen.streams.operators import Foreach, KeyBy, Operator, Reduce, Sink, Stateless
from queen.streams.windows import Session, Window


class _Phase(IntEnum):
    """Phase of a chain that its next operator belongs to."""

    BEFORE = auto()
    WINDOWED = auto()
    REDUCED = auto()
    GATED = auto()


@dataclass(slots=True)
class Chain:
    """The stages of a stream: `before` processes messages, `after` the output of a reducer or a gate."""

    config_hash: str
    before: list[Stateless] = field(default_factory=list)
    key_by: KeyBy | None = None
    window: Window | None = None
    reducer: Reduce | None = None
    gate: Gate | None = None
    after: list[Stateless] = field(default_factory=list)
    end: Sink | Foreach | None = None

    @property
    def sink_queue(self) -> str | None:
        return self.end.queue if isinstance(self.end, Sink) else None


def compile_chain(operators: Sequence[Operator]) -> Chain:
    """Compile a chain. Raises `ValueError` for an invalid order of operators."""
    chain = Chain(config_hash_of(operators))
    phase = _Phase.BEFORE
    for position, operator in enumerate(operators):
        if chain.end is not None:
            raise ValueError(f".to() and .foreach() must be last in the chain, but {operator.kind} follows")
        phase = _add(chain, operator, phase, position)
    if isinstance(chain.window, Session) and chain.reducer is None:
        raise ValueError("window_session requires a .reduce() or .aggregate() after it")
    return chain


def _add(chain: Chain, operator: Operator, phase: _Phase, position: int) -> _Phase:
    if isinstance(operator, Stateless):
        (chain.before if phase <= _Phase.WINDOWED else chain.after).append(operator)
    elif isinstance(operator, KeyBy):
        _check(chain.key_by is None, "only one .key_by() per stream")
        _check(phase <= _Phase.WINDOWED, ".key_by() must come before reduce and gate")
        chain.key_by = operator
    elif isinstance(operator, Window):
        _check(chain.window is None, "only one window per stream")
        _check(chain.gate is None, "a window and .gate() cannot be combined")
        chain.window = operator
        return _Phase.WINDOWED
    elif isinstance(operator, Reduce):
        _check(chain.reducer is None, "only one .reduce() or .aggregate() per stream")
        _check(chain.window is not None, ".reduce() and .aggregate() require a window before them")
        chain.reducer = operator
        return _Phase.REDUCED
    elif isinstance(operator, Gate):
        _check(chain.gate is None, "only one .gate() per stream")
        _check(chain.window is None, ".gate() and a window cannot be combined")
        chain.gate = operator
        return _Phase.GATED
    elif isinstance(operator, Sink | Foreach):
        chain.end = operator
    else:
        raise ValueError(f"unknown operator at position {position}: {operator!r}")
    return phase


def _check(valid: bool, message: str) -> None:
    if not valid:
        raise ValueError(message)


def config_hash_of(operators: Iterable[Operator]) -> str:
    """A hash of what state depends on: kinds, order and configuration of operators, but not the functions.

    The server rejects a query whose state belongs to another hash. All Queen SDKs compute the same hash.
    """
    described = [{"kind": operator.kind, **operator.config} for operator in operators]
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
