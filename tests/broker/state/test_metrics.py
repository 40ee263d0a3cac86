"""What is counted of keys, locks and timers."""

from __future__ import annotations

from typing import Any

from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.api import Api


async def metrics(api: Api) -> dict[str, float]:
    """The samples of a scrape, by name and labels."""
    text = (await api.call("GET", "/metrics/prometheus")).body
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def post(api: Api, what: str, *operations: dict[str, Any]) -> Any:
    answer = await api.call("POST", f"/api/v1/{what}", {"operations": list(operations)})
    assert answer.status == 200, answer
    return answer.body


async def test_operations_are_counted_by_what_came_of_them(start_server: StartServer) -> None:
    api = await start_server()
    put = {"op": "putIfAbsent", "ns": "orders", "key": "k", "value": 1, "forever": True}
    await post(api, "kv", put, put, {"op": "get", "ns": "orders", "key": "k"})
    push = {"type": "push", "items": [{"queue": "orders", "payload": 1}]}
    check = {"op": "check", "ns": "orders", "key": "none", "expect": 0}
    await api.call("POST", "/api/v1/transaction", {"operations": [push], "kv": [check]})
    acquire = {"op": "acquire", "name": "report", "ttlSeconds": 60}
    for owner in ("a", "b"):
        await post(api, "locks", acquire | {"owner": owner})
    timer = {"queue": "orders", "timerKey": "t"}
    later = {"op": "schedule", "payload": "MQ==", "delayMs": 3_600_000} | timer
    await post(api, "timers", later)
    counted = await metrics(api)
    for name, count in {
        'queen_kv_operations_total{op="putIfAbsent",outcome="ok"}': 1,
        'queen_kv_operations_total{op="putIfAbsent",outcome="exists"}': 1,
        'queen_kv_operations_total{op="get",outcome="ok"}': 1,
        'queen_kv_operations_total{op="check",outcome="ok"}': 1,
        'queen_lock_operations_total{op="acquire",outcome="ok"}': 1,
        'queen_lock_operations_total{op="acquire",outcome="held"}': 1,
        'queen_timer_operations_total{op="schedule",outcome="scheduled"}': 1,
        "queen_timers_pending": 1,
        "queen_timers_due": 0,
        "queen_timer_lag_seconds": 0,
    }.items():
        assert counted.get(name) == count, name
    await post(api, "timers", {"op": "cancel"} | timer)
    await post(api, "timers", later | {"delayMs": 0})
    await until(lambda: _fired(api))


async def _fired(api: Api) -> bool:
    counted = await metrics(api)
    return (
        counted.get('queen_timer_operations_total{op="fire",outcome="pushed"}') == 1
        and counted['queen_timer_operations_total{op="cancel",outcome="cancelled"}'] == 1
    )
