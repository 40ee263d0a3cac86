"""Timers: they push their message once, when they are due, unless they were replaced or cancelled."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.api import Api, payloads
from tests.support.database import Connection, dead_letters

LATER = 600_000


def schedule(key: str, payload: Any, delay: int = LATER, **fields: Any) -> dict[str, Any]:
    body = base64.b64encode(json.dumps(payload).encode()).decode()
    return {"op": "schedule", "queue": "q", "timerKey": key, "payload": body, "delayMs": delay} | fields


async def timers(api: Api, *operations: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await api.call("POST", "/api/v1/timers", {"operations": operations})
    assert answer.status == 200, answer
    results: list[dict[str, Any]] = answer.body["results"]
    return results


async def listed(api: Api, **query: Any) -> Any:
    return (await api.call("GET", "/api/v1/timers/q", **query)).body


async def fire_all(connection: Connection) -> None:
    """Have every timer be due; the worker that looks for those of others fires them."""
    await connection.execute("UPDATE queen.timers SET deliver_at = clock_timestamp()")


async def test_timers_of_all_queues_are_listed_by_the_time_they_are_due(api: Api) -> None:
    await timers(api, schedule("b", 1, LATER + 2000), schedule("a", 2, LATER + 3000))
    await timers(api, schedule("a1", 3, LATER + 1000, queue="other", txn="t"))
    found = (await api.call("GET", "/api/v1/timers")).body
    assert [(one["queue"], one["timerKey"]) for one in found["timers"]] == [("other", "a1"), ("q", "b"), ("q", "a")]
    assert (found["timers"][0]["txn"], found["total"], found["exact"]) == ("t", 3, True)
    some = (await api.call("GET", "/api/v1/timers", prefix="a", limit=1, offset=1)).body
    assert [one["queue"] for one in some["timers"]] == ["q"] and some["total"] == 2
    of_queue = (await api.call("GET", "/api/v1/timers", queue="q")).body
    assert [one["timerKey"] for one in of_queue["timers"]] == ["b", "a"]


async def test_a_timer_pushes_its_message_when_it_is_due(api: Api) -> None:
    (result,) = await timers(api, schedule("a", {"order": 7}, 20, partition="p", txn="t-1"))
    assert (result["ok"], result["status"], result["txn"]) == (True, "scheduled", "t-1")
    (message,) = await api.pop("q", "p", wait=True)
    assert (message["data"], message["transactionId"]) == ({"order": 7}, "t-1")
    assert (await api.call("GET", "/api/v1/timers/q/a")).body == {"found": False}
    (past,) = await timers(api, schedule("b", 1, -1000))
    (message,) = await api.pop("q", wait=True)
    assert message["transactionId"] == past["txn"]


async def test_a_timer_is_replaced_cancelled_listed_and_shown(api: Api) -> None:
    (first,) = await timers(api, schedule("a", 1))
    (second,) = await timers(api, schedule("a", {"v": 2}, 300_000, op="reschedule", txn="t"))
    assert (second["status"], second["deliverAt"] < first["deliverAt"]) == ("rescheduled", True)
    shown = (await api.call("GET", "/api/v1/timers/q/a")).body
    assert (shown["found"], shown["payload"], shown["txn"]) == (True, {"v": 2}, "t")
    assert (shown["messageId"], shown["deliverAt"]) == (second["messageId"], second["deliverAt"])
    await timers(api, schedule("b", 1), schedule("c", 1))
    page = await listed(api, limit=2)
    assert ([row["timerKey"] for row in page["rows"]], page["truncated"]) == (["a", "b"], True)
    rest = await listed(api, after=page["nextAfter"])
    assert ([row["timerKey"] for row in rest["rows"]], rest["nextAfter"]) == (["c"], None)
    cancelled = (await api.call("DELETE", "/api/v1/timers/q/a")).body
    assert (cancelled["ok"], cancelled["status"], cancelled["txn"]) == (True, "cancelled", "t")
    absent = (await api.call("DELETE", "/api/v1/timers/q/a", txn="t")).body
    assert (absent["ok"], absent["status"], absent["txn"]) == (False, "absent", "t")
    mixed = await timers(api, {"op": "cancel", "queue": "q", "timerKey": "x"}, schedule("d", 1))
    assert [(one["index"], one["status"]) for one in mixed] == [(0, "absent"), (1, "scheduled")]
    assert (await api.call("DELETE", "/api/v1/resources/queues/q")).status == 200
    assert (await listed(api))["rows"] == []


async def test_timers_of_other_workers_are_found_and_pushed_once(api: Api, connection: Connection) -> None:
    await timers(api, *[schedule(f"k{number}", number, txn=f"t-{number}") for number in range(50)])
    await api.push("q", "before", ids=["t-7"])
    await fire_all(connection)
    await until(lambda: _is_fired(connection))
    messages = await api.pop("q", batch=100, autoAck=True)
    # One was there before, by its transaction id.
    assert sorted(map(str, payloads(messages))) == sorted(["before", *(str(n) for n in range(50) if n != 7)])


async def test_what_does_not_fit_its_queue_becomes_a_dead_letter(api: Api, connection: Connection) -> None:
    await api.configure("q", maxSize=1)
    await api.push("q", 1)
    await timers(api, schedule("a", 2), schedule("b", 3))
    await fire_all(connection)
    await until(lambda: _is_fired(connection))
    assert len(await dead_letters(connection, "q")) == 2


async def test_a_timer_in_a_transaction_is_scheduled_or_cancelled_with_it(api: Api) -> None:
    async def commit(*riders: dict[str, Any], kv: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
        body = {"operations": [], "timers": riders, "kv": kv}
        found: dict[str, Any] = (await api.call("POST", "/api/v1/transaction", body)).body
        return found

    put = {"op": "putIfAbsent", "ns": "q", "key": "saga", "value": 1, "ttlSeconds": 60, "required": True}
    first = await commit(schedule("a", 1), kv=(put,))
    assert [result["type"] for result in first["results"]] == ["kv", "timer"]
    assert (first["results"][1]["index"], first["results"][1]["status"]) == (1, "scheduled")
    assert not (await commit(schedule("b", 1), kv=(put,)))["success"]
    assert [row["timerKey"] for row in (await listed(api))["rows"]] == ["a"]
    assert (await commit({"op": "cancel", "queue": "q", "timerKey": "a"}))["results"][0]["status"] == "cancelled"
    assert (await commit(schedule("c", "soon", 10)))["success"]
    assert payloads(await api.pop("q", wait=True)) == ["soon"]


@pytest.mark.parametrize("key", [None, "ab" * 32])
async def test_the_payload_of_a_timer_is_sealed_like_that_of_a_message(
    start_server: StartServer, connection: Connection, key: str | None
) -> None:
    api = await start_server(queen_encryption_key=(key,) if key else ())
    await api.configure("q", encryptionEnabled=True)
    answer = await api.call("POST", "/api/v1/timers", {"operations": [schedule("a", "secret")]})
    if key is None:
        assert answer.status == 409 and "QUEEN_ENCRYPTION_KEY" in answer.body["error"]
        return
    assert b"secret" not in await connection.fetchval("SELECT body FROM queen.timers")
    assert (await api.call("GET", "/api/v1/timers/q/a")).body["payload"] == "secret"
    await fire_all(connection)
    assert payloads(await api.pop("q", wait=True)) == ["secret"]


async def _is_fired(connection: Connection) -> bool:
    return await connection.fetchval("SELECT count(*) = 0 FROM queen.timers") is True


async def test_a_queue_is_deleted_while_its_timers_fire(api: Api) -> None:
    for _ in range(10):
        await api.push("q", *range(3))
        await timers(api, *(schedule(f"k{number}", number, 0, partition="p") for number in range(20)))
        deleted = await api.call("DELETE", "/api/v1/resources/queues/q")
        assert (deleted.status, deleted.body["existed"]) == (200, True)
