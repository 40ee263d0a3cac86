"""Locks: one holder at a time, tokens that rise, and transactions that are guarded by them."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.api import Api
from tests.support.database import Connection


async def lock(api: Api, op: str, name: str = "report", **fields: Any) -> dict[str, Any]:
    if op in ("acquire", "renew"):
        fields.setdefault("ttlSeconds", 60)
    answer = await api.call("POST", "/api/v1/locks", {"operations": [{"op": op, "name": name} | fields]})
    assert answer.status == 200, answer
    (result,) = answer.body["results"]
    found: dict[str, Any] = result
    return found


async def guarded(api: Api, permit: dict[str, Any], payload: Any) -> dict[str, Any]:
    push = {"type": "push", "items": [{"queue": "out", "payload": payload}]}
    answer = await api.call("POST", "/api/v1/transaction", {"operations": [push], "kv": [permit["guard"]]})
    found: dict[str, Any] = answer.body
    return found


async def test_a_lock_has_one_holder_until_it_is_released(api: Api) -> None:
    assert await lock(api, "get") == {"index": 0, "name": "report", "held": False, "holders": []}
    first = await lock(api, "acquire", owner="a")
    assert first["acquired"] and (first["slot"], first["owner"]) == (0, "a")
    again = await lock(api, "acquire", owner="a")
    assert (again["already"], again["token"], again["guard"]) == (True, first["token"], first["guard"])
    refused = await lock(api, "acquire", owner="b")
    assert (refused["acquired"], refused["reason"], refused["holders"][0]["owner"]) == (False, "held", "a")
    assert not (await lock(api, "acquire"))["acquired"]
    held = await lock(api, "get")
    assert held["held"] and held["holders"][0]["token"] == first["token"]
    assert (await lock(api, "release", token=first["token"] + 1))["reason"] == "lost"
    assert (await lock(api, "release", token=first["token"]))["released"]
    second = await lock(api, "acquire")
    assert second["acquired"] and second["token"] > first["token"] and second["owner"]


async def test_a_renewal_gives_a_new_token_and_can_be_sent_again_by_its_owner(api: Api) -> None:
    first = await lock(api, "acquire", owner="a")
    renewed = await lock(api, "renew", token=first["token"], owner="a")
    resent = await lock(api, "renew", token=first["token"], owner="a")
    assert renewed["renewed"] and resent["renewed"] and resent["token"] > renewed["token"] > first["token"]
    stranger = await lock(api, "renew", token=resent["token"], owner="b")
    assert (stranger["renewed"], stranger["reason"], stranger["holders"][0]["owner"]) == (False, "lost", "a")
    assert not (await lock(api, "renew", token=first["token"]))["renewed"]
    assert (await lock(api, "renew", token=resent["token"]))["renewed"]
    assert not (await lock(api, "renew", "nobody's", token=1))["renewed"]
    since = {holder["since"] for holder in (await lock(api, "get"))["holders"]}
    assert len(since) == 1


async def test_a_holder_whose_permit_expired_commits_nothing(api: Api, connection: Connection) -> None:
    old = await lock(api, "acquire", owner="old")
    assert (await guarded(api, old, "first"))["success"]
    await connection.execute("UPDATE queen.kv SET expires_at = clock_timestamp()")
    new = await lock(api, "acquire", owner="new")
    assert new["acquired"] and new["token"] > old["token"]
    late = await guarded(api, old, "late")
    assert (late["success"], late["reason"], late["kvReason"]) == (False, "kv_precondition", "version")
    assert late["value"]["owner"] == "new"
    assert (await guarded(api, new, "second"))["success"]
    assert [message["data"] for message in await api.pop("out", batch=10)] == ["first", "second"]


async def test_permits_are_listed_by_the_names_of_their_locks(api: Api) -> None:
    for name, owner in (("b", "one"), ("b", "two"), ("a", "three"), ("other", "four")):
        assert (await lock(api, "acquire", name, owner=owner, limit=2))["acquired"]
    # Anybody may write keys into the namespace of locks.
    keys = [{"op": "put", "ns": "queen-locks", "key": key, "value": 1, "forever": True} for key in ("odd", "odd#0")]
    await api.call("POST", "/api/v1/kv", {"operations": keys})
    listed = (await api.call("GET", "/api/v1/locks")).body
    assert [(one["name"], one["slot"], one["owner"]) for one in listed["locks"]] == [
        ("a", 0, "three"),
        ("b", 0, "one"),
        ("b", 1, "two"),
        ("other", 0, "four"),
    ]
    page = (await api.call("GET", "/api/v1/locks", prefix="b", limit=1, offset=1)).body
    assert [one["owner"] for one in page["locks"]] == ["two"] and page["total"] == 2 and page["exact"]
    held = page["locks"][0]
    assert (await lock(api, "release", "b", token=held["token"], slot=held["slot"]))["released"]
    assert [one["owner"] for one in (await api.call("GET", "/api/v1/locks", prefix="b")).body["locks"]] == ["one"]


async def test_a_semaphore_gives_as_many_permits_as_it_has(api: Api) -> None:
    asked = [lock(api, "acquire", "crowd", owner=f"owner-{number}", limit=3) for number in range(10)]
    permits = [result for result in await asyncio.gather(*asked) if result["acquired"]]
    assert sorted(permit["slot"] for permit in permits) == [0, 1, 2]
    assert [holder["slot"] for holder in (await lock(api, "get", "crowd"))["holders"]] == [0, 1, 2]
    freed = permits[1]
    assert (await lock(api, "release", "crowd", token=freed["token"], slot=freed["slot"]))["released"]
    assert (await lock(api, "acquire", "crowd", limit=3))["slot"] == freed["slot"]
    # A lock whose name another begins with is another lock.
    assert (await lock(api, "acquire", "crow"))["acquired"]
