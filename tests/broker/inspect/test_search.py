"""Searching messages with a cursor, and changing many of them at once."""

from __future__ import annotations

from typing import Any

import pytest

from queen.broker.inspect import search as searching
from queen.wire.conditions import PayloadFilter, decode_conditions
from tests.conftest import StartServer
from tests.support.ageing import Connection, age
from tests.support.api import Api, payloads

SEARCH = "/api/v1/messages/search"


async def search(api: Api, **query: Any) -> list[dict[str, Any]]:
    """All that a search finds, cursor after cursor."""
    found: list[dict[str, Any]] = []
    while True:
        answer = await api.call("GET", SEARCH, queue="q", **query)
        assert answer.status == 200, answer
        found += answer.body["messages"]
        if answer.body["cursor"] is None:
            return found
        query["cursor"] = answer.body["cursor"]


async def bulk(api: Api, what: str, **body: Any) -> dict[str, Any]:
    answer = await api.call("POST", f"/api/v1/messages/{what}", {"queue": "q", **body})
    assert answer.status == 200, answer
    assert answer.body["success"]
    done: dict[str, Any] = answer.body
    return done


def numbers(messages: list[dict[str, Any]]) -> list[int]:
    return [message["data"]["n"] for message in messages]


def refs(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{key: message[key] for key in ("partitionId", "transactionId")} for message in messages]


@pytest.mark.parametrize(
    ("text", "where", "payload", "admitted"),
    [
        ("", "", "null", True),
        ("é", "", r'"caf\u00e9"', True),
        ("é", "", '"café"', True),
        ('"id":7', "", '{"id":7}', True),
        ("EUR", "", '{"currency":"USD"}', False),
        ("", "customer.id=42", '{"customer":{"id":42}}', True),
        ("", "customer.id=42", '{"customer":{"id":"42"}}', True),
        ("", "customer.id!=42", '{"customer":{"id":42}}', False),
        ("", "items.1.price>=10", '{"items":[{},{"price":10}]}', True),
        ("", "items.9.price>=10", '{"items":[]}', False),
        ("", '["a>1","b<2"]', '{"a":2,"b":2}', False),
        ("", "a>1", '{"a":"text"}', False),
        ("", "a=null", "[]", True),
    ],
)
def test_payloads_pass_a_filter_or_not(text: str, where: str, payload: str, admitted: bool) -> None:
    assert PayloadFilter.of(text, decode_conditions(where)).admits(payload.encode()) is admitted


async def test_messages_are_found_by_what_is_known_of_them(api: Api, connection: Connection) -> None:
    await api.push("q", {"n": 1, "who": "ann"}, {"n": 2, "who": "bob"}, partition="a")
    await age(connection, 3600)
    await api.push("q", {"n": 3, "who": "ann"}, partition="a")
    await api.push("q", {"n": 4, "who": "bob"}, {"n": 5, "who": "eve"}, partition="b")
    assert numbers(await search(api)) == [3, 2, 1, 5, 4]
    assert numbers(await search(api, partition="b")) == [5, 4]
    assert numbers(await search(api, text="bob")) == [2, 4]
    assert numbers(await search(api, where='["who=ann","n>1"]')) == [3]
    since = (await search(api, where="n=3"))[0]["createdAt"]
    assert numbers(await search(api, **{"from": since})) == [3, 5, 4]
    assert numbers(await search(api, to=since)) == [2, 1]
    await api.ack(await api.pop("q", "a", batch=1), "completed")
    await api.ack(await api.pop("q", "b", batch=1), "dlq")
    held = await api.pop("q", "b")
    assert payloads(held)[0]["n"] == 5
    assert numbers(await search(api, status="completed")) == [1]
    assert numbers(await search(api, status="pending")) == [3, 2]
    assert numbers(await search(api, status="processing")) == [5]
    (dead,) = await search(api, status="dead_letter")
    assert (dead["data"]["n"], dead["status"], dead["partition"], dead["offset"]) == (4, "dead_letter", "b", 0)
    assert (await api.call("GET", SEARCH, queue="nobody")).status == 404


@pytest.mark.parametrize("limit", [1, 3, 1000])
async def test_a_search_goes_on_where_it_stopped(
    api: Api, connection: Connection, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(searching, "_MOST_MESSAGES", 4)
    monkeypatch.setattr(searching, "_SEGMENTS_AT_ONCE", 2)
    monkeypatch.setattr(searching, "_PARTITIONS_AT_ONCE", 2)
    expected: list[str] = []
    for partition in ("a", "b", "c", "d", "e"):
        pushed = [f"{partition}{number}" for number in range(7)]
        for at in (0, 3, 4):
            await api.push("q", *pushed[at : {0: 3, 3: 4, 4: 7}[at]], partition=partition)
        expected += reversed(pushed)
    assert [message["data"] for message in await search(api, limit=limit)] == expected
    assert [message["data"] for message in await search(api, limit=limit, text="c")] == [
        text for text in expected if text.startswith("c")
    ]


async def test_what_was_deleted_or_is_out_of_reach_is_not_found(api: Api) -> None:
    await api.push("q", 1, 2, 3)
    (second,) = await search(api, text="2")
    await api.call("DELETE", f"/api/v1/messages/{second['partitionId']}/{second['transactionId']}")
    assert [message["data"] for message in await search(api)] == [3, 1]
    await api.call("DELETE", "/api/v1/queues/q/clear")
    assert await search(api) == []


async def test_a_message_that_cannot_be_read_is_shown_as_such(start_server: StartServer) -> None:
    sealed = await start_server(queen_encryption_key=("00" * 32,), worker_id=0, num_workers=2)
    await sealed.configure("q", encryptionEnabled=True)
    await sealed.push("q", "secret")
    assert [message["data"] for message in await search(sealed, text="secret")] == ["secret"]
    other = await start_server(worker_id=1, num_workers=2)
    (message,) = await search(other)
    assert message["unreadable"]
    assert await search(other, text="secret") == []
    done = await bulk(other, "retry", filter={})
    assert (done["matched"], done["done"], done["failed"]) == (1, 0, 1)
    assert "cannot be read" in done["errors"][0]["error"]


async def test_many_messages_are_deleted_with_their_letters_and_others_stay(api: Api) -> None:
    for partition in ("a", "b"):
        await api.push("q", *range(600), partition=partition)
    await api.ack(await api.pop("q", "a", batch=3, consumerGroup="g"), "dlq", group="g")
    chosen = (await search(api, partition="a", limit=1000))[100:]
    counted = await bulk(api, "delete", messages=refs(chosen), dryRun=True)
    assert (counted["matched"], counted["done"]) == (500, 0)
    strangers = [{"partitionId": chosen[0]["partitionId"], "transactionId": "nobody"}, refs(chosen)[0]]
    strangers.append({"partitionId": "no id", "transactionId": "t"})
    done = await bulk(api, "delete", messages=refs(chosen) + strangers)
    assert (done["matched"], done["done"], done["notFound"], done["failed"]) == (500, 500, 2, 0)
    assert sorted(message["data"] for message in await search(api, partition="a")) == list(range(500, 600))
    assert (await api.call("GET", "/api/v1/dlq", queue="q")).body["total"] == 0
    assert len(await search(api, partition="b", limit=1000)) == 600
    assert payloads(await api.pop("q", "a", batch=1000)) == list(range(500, 600))
    again = await bulk(api, "delete", messages=refs(chosen))
    assert (again["done"], again["notFound"]) == (0, 500)


async def test_messages_of_a_filter_are_retried_once_each_although_copies_are_stored_meanwhile(api: Api) -> None:
    await api.push("q", *range(250), partition="a")
    await api.push("q", *range(250), partition="b")
    await api.ack(await api.pop("q", "a", batch=250), "dlq")
    cursor, done, matched = None, 0, 0
    while True:
        answer = await bulk(api, "retry", filter={"where": []}, limit=90, cursor=cursor)
        done, matched, cursor = done + answer["done"], matched + answer["matched"], answer["cursor"]
        if cursor is None:
            break
    assert (done, matched) == (500, 500)
    assert (await api.call("GET", "/api/v1/dlq", queue="q")).body["total"] == 0
    assert len(payloads(await api.pop("q", "a", batch=1000))) == 250
    assert sorted(payloads(await api.pop("q", "b", batch=1000))) == sorted(2 * list(range(250)))


async def test_messages_become_dead_letters_of_a_group_and_can_be_redriven(api: Api) -> None:
    await api.push("q", *({"n": number} for number in range(300)))
    done = await bulk(api, "dlq", filter={"where": ["n>=100"]}, consumerGroup="g", error="by hand")
    assert (done["matched"], done["done"], done["cursor"]) == (200, 200, None)
    listed = (await api.call("GET", "/api/v1/dlq", queue="q", consumerGroup="g", limit=1)).body
    assert listed["total"] == 200
    assert (listed["messages"][0]["errorMessage"], listed["messages"][0]["retryCount"]) == ("by hand", 0)
    dead = await search(api, status="dead_letter", limit=1000)
    assert [message["data"]["n"] for message in dead] == list(range(299, 99, -1))
    redriven = await bulk(api, "retry", filter={"status": "dead_letter"})
    assert redriven["done"] == 200
    assert len(await search(api, limit=1000)) == 500
    assert (await bulk(api, "dlq", messages=refs(dead[:1])))["done"] == 1
