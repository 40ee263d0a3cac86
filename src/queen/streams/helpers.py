"""Rate limiting gates, per key.

Denied messages are redelivered when the lease of the batch expires, so the lease time of the source queue is the retry
interval: a bucket should hold at least what is refilled in that time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from queen.streams.gates import GateContext

GateFunction: TypeAlias = Callable[[Any, GateContext], bool]
CostFunction: TypeAlias = Callable[[Any], float]


def unit_cost(value: Any) -> float:
    """Every message costs one."""
    return 1


def token_bucket_gate(
    capacity: float, refill_per_sec: float, cost_fn: CostFunction = unit_cost, allow_zero_cost: bool = True
) -> GateFunction:
    """Token bucket of `capacity` tokens, refilled at a constant rate; admits a message if its cost is available."""
    _check_positive(capacity, "token_bucket_gate: capacity")
    _check_positive(refill_per_sec, "token_bucket_gate: refill_per_sec")
    _check_function(cost_fn, "token_bucket_gate: cost_fn")

    def token_bucket(value: Any, context: GateContext) -> bool:
        state, now = context.state, context.stream_time_ms
        tokens, refilled_at = _number(state.get("tokens"), capacity), _number(state.get("lastRefillAt"), now)
        tokens = min(capacity, tokens + max(0.0, (now - refilled_at) / 1000) * refill_per_sec)
        state["tokens"], state["lastRefillAt"] = tokens, now
        cost = _cost(cost_fn, value)
        if cost == 0:
            return allow_zero_cost
        if tokens < cost:
            return False
        state["tokens"] = tokens - cost
        state["allowedTotal"] = state.get("allowedTotal", 0) + 1
        state["consumedTotal"] = state.get("consumedTotal", 0) + cost
        return True

    return token_bucket


def sliding_window_gate(limit: float, window_sec: float, cost_fn: CostFunction = unit_cost) -> GateFunction:
    """At most `limit` in the last `window_sec` seconds, estimated from the current and the previous window."""
    _check_positive(limit, "sliding_window_gate: limit")
    _check_positive(window_sec, "sliding_window_gate: window_sec")
    _check_function(cost_fn, "sliding_window_gate: cost_fn")
    window_ms = window_sec * 1000

    def sliding_window(value: Any, context: GateContext) -> bool:
        state, now = context.state, context.stream_time_ms
        current = math.floor(now / window_ms)
        if state.get("window") != current:
            consecutive = state.get("window") == current - 1
            state["previousCount"] = state.get("currentCount", 0) if consecutive else 0
            state["currentCount"] = 0
            state["window"] = current
        previous_weight = 1 - (now % window_ms) / window_ms
        estimate = (state.get("previousCount") or 0) * previous_weight + (state.get("currentCount") or 0)
        cost = _cost(cost_fn, value)
        if estimate + cost > limit:
            return False
        state["currentCount"] = state.get("currentCount", 0) + cost
        return True

    return sliding_window


def _cost(cost_fn: CostFunction, value: Any) -> float:
    """The cost by the function; 1 if it is not a non-negative number."""
    cost = cost_fn(value)
    return cost if _is_number(cost) and cost >= 0 else 1


def _number(value: Any, otherwise: float) -> float:
    return value if _is_number(value) else otherwise


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_positive(value: Any, what: str) -> None:
    if not _is_number(value) or value <= 0:
        raise ValueError(f"{what} must be a number above 0, not {value!r}")


def _check_function(value: Any, what: str) -> None:
    if not callable(value):
        raise TypeError(f"{what} must be a function, not {value!r}")
