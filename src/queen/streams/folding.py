"""Folds values into windows: rows and values in, state changes and emits out. Pure except for the user's reducer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from queen.streams.operators import Reduce
from queen.streams.records import Emit, Outcome, Record, Row, Rows, Span, parse_iso_ms
from queen.streams.windows import SEPARATOR, Session, SpanWindow


@dataclass(slots=True)
class _Open:
    """An open window; `stored` is its row on the server."""

    key: str
    span: Span
    accumulator: Any
    stored: Row | None
    touched: bool = False


async def fold_windows(
    window: SpanWindow, reducer: Reduce, rows: Rows, placed: Iterable[tuple[Record, Span]], clock: int | None
) -> Outcome:
    """Add values to their windows, and close those that have ended by the clock (None: no window)."""
    windows: dict[str, _Open] = {}
    for state_key, row in rows.items():
        found = _read_window(window, state_key, row)
        if found is not None:
            windows[state_key] = found
    for record, span in placed:
        state_key = window.state_key(span, record.key)
        one = windows.get(state_key)
        if one is None:
            one = windows[state_key] = _Open(record.key, span, reducer.initial(), None)
        one.accumulator = await reducer.add(one.accumulator, record.reduced)
        one.touched = True
    outcome = Outcome()
    # Windows are emitted in the order of their end; equal ones in the order of their first value.
    for state_key, one in sorted(windows.items(), key=lambda item: item[1].span.end):
        if clock is not None and one.span.end + window.grace_ms <= clock:
            outcome.emits.append(Emit(one.key, one.accumulator, one.span))
            if one.stored is not None:
                outcome.delete(state_key, one.stored.version)
            continue
        outcome.ends.append(one.span.end)
        if one.touched:
            value = {"acc": one.accumulator, "windowStart": one.span.start, "windowEnd": one.span.end}
            outcome.upsert(state_key, value, one.stored.version if one.stored else None)
    return outcome


def _read_window(window: SpanWindow, state_key: str, row: Row) -> _Open | None:
    """The window stored in a row; None for other rows."""
    parts = state_key.split(SEPARATOR, 2)
    if len(parts) < 3 or parts[0] != window.tag:
        return None
    start, end = row.number("windowStart"), row.number("windowEnd")
    if start is None:
        start = parse_iso_ms(parts[1]) or 0
    span = Span(start, start if end is None else end, parts[1])
    return _Open(parts[2], span, _accumulator(row), row)


def _accumulator(row: Row) -> Any:
    if isinstance(row.value, Mapping) and "acc" in row.value:
        return row.value["acc"]
    return row.value


@dataclass(slots=True)
class _OpenSession:
    start: int
    last: int
    accumulator: Any
    touched: bool = False


async def fold_sessions(
    window: Session, reducer: Reduce, rows: Rows, placed: Iterable[tuple[Record, int]], clock: int | None
) -> Outcome:
    """Add values to the sessions of their keys, start new ones after a gap, and close those that have ended."""
    sessions: dict[str, _OpenSession] = {}
    for state_key, row in rows.items():
        found = _read_session(window, state_key, row)
        if found is not None:
            sessions[state_key.removeprefix(window.prefix)] = found
    outcome = Outcome()
    # Sorted by time, so that an out-of-order value does not split a session.
    for record, ms in sorted(placed, key=lambda pair: pair[1]):
        session = sessions.get(record.key)
        if session is not None and session.last + window.gap_ms < ms:
            outcome.emits.append(_session_emit(window, record.key, session))
            session = None
        if session is None:
            session = sessions[record.key] = _OpenSession(ms, ms, _initial(reducer))
        session.start, session.last = min(session.start, ms), max(session.last, ms)
        session.accumulator = await reducer.add(session.accumulator, record.reduced)
        session.touched = True
    for key, session in sessions.items():
        state_key = window.state_key(key)
        stored = rows.get(state_key)
        end = session.last + window.gap_ms
        if clock is not None and end + window.grace_ms <= clock:
            outcome.emits.append(_session_emit(window, key, session))
            if stored is not None:
                outcome.delete(state_key, stored.version)
            continue
        outcome.ends.append(end)
        if session.touched:
            value = {
                "acc": session.accumulator,
                "sessionStart": session.start,
                "lastEventTime": session.last,
                "windowEnd": end,
            }
            outcome.upsert(state_key, value, stored.version if stored else None)
    return outcome


def _read_session(window: Session, state_key: str, row: Row) -> _OpenSession | None:
    last = row.number("lastEventTime")
    if not state_key.startswith(window.prefix) or last is None:
        return None
    start = row.number("sessionStart")
    return _OpenSession(last if start is None else start, last, _accumulator(row))


def _initial(reducer: Reduce) -> Any:
    initial = reducer.initial()
    return 0 if initial is None else initial


def _session_emit(window: Session, key: str, session: _OpenSession) -> Emit:
    return Emit(key, session.accumulator, window.span(session.start, session.last))
