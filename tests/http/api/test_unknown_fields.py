"""Fields and query parameters that no route has are refused, with the nearest known name; clients' own are taken."""

from __future__ import annotations

from typing import Any

import pytest

from queen.http.api.table import all_routes
from queen.http.routing.route import Media
from tests.support.api import Api
from tests.support.topic_api import TopicApi, item

_PATH = {
    "timer": "t",
    "namespace": "n",
    "key": "k",
    "stream": "s",
    "pipeline": "p",
    "queue": "q",
    "partition": "p",
    "group": "g",
    "lease": "l",
    "transaction": "t",
    "name": "n",
}
_ROUTES = [operation for operation in all_routes() if operation.upgrade is None]
_WITH_BODY = [one for one in _ROUTES if isinstance(one.body_example, dict)]


async def test_every_route_refuses_an_unknown_query_parameter(api: Api) -> None:
    for operation in _ROUTES:
        body = operation.body_example if not isinstance(operation.body, Media) else None
        answer = await api.call(operation.method, operation.path.format(**_PATH), body, nonsense="1")
        assert answer.status == 400, (operation.key, answer)
        assert answer.body["error"] == "unknown query parameter 'nonsense'"


async def test_every_route_refuses_an_unknown_field_of_its_body(api: Api) -> None:
    for operation in _WITH_BODY:
        body = {**operation.body_example, "nonsense": 1}
        answer = await api.call(operation.method, operation.path.format(**_PATH), body)
        assert answer.status == 400, (operation.key, answer)
        assert answer.body["error"].startswith("unknown field 'nonsense'")


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        (
            "/api/v1/configure",
            {"queue": "q", "options": {"leaseTimee": 5}},
            "unknown field 'leaseTimee' (at options); did you mean 'leaseTime'?",
        ),
        (
            "/api/v1/push",
            {"items": [{"queue": "q"}, {"queue": "q", "payloda": 1}]},
            "unknown field 'payloda' (at items[1]); did you mean 'payload'?",
        ),
        (
            "/api/v1/ack/batch",
            {"acknowledgments": [{"transactionId": "t", "partitionId": "p", "leaseID": "l"}]},
            "unknown field 'leaseID' (at acknowledgments[0]); did you mean 'leaseId'?",
        ),
        ("/api/v1/transaction", {"operations": [{"type": "push", "items": []}], "locks": []}, "unknown field 'locks'"),
        (
            "/api/v1/transaction",
            {"operations": [{"type": "push", "items": [], "timers": []}]},
            "unknown field 'timers' (at operations[0])",
        ),
        (
            "/api/v1/topics/enqueue",
            [{"namespace": "n", "topic": "t", "data": 1, "priorty": 1}],
            "unknown field 'priorty' (at [0]); did you mean 'priority'?",
        ),
    ],
)
async def test_the_error_names_the_field_its_place_and_the_nearest_name(
    api: Api, path: str, body: Any, error: str
) -> None:
    answer = await api.call("POST", path, body)
    assert (answer.status, answer.body["error"][: len(error)]) == (400, error)
    assert (await api.call("GET", "/api/v1/resources/queues")).body == {"queues": []}


async def test_a_query_parameter_with_a_typing_error_is_answered_with_the_right_name(api: Api) -> None:
    answer = await api.call("GET", "/api/v1/pop/queue/q", batchs=5)
    assert (answer.status, answer.body) == (400, {"error": "unknown query parameter 'batchs'; did you mean 'batch'?"})


async def test_data_is_taken_as_the_payload_of_a_push_and_of_a_transaction(api: Api) -> None:
    pushed = await api.call("POST", "/api/v1/push", {"items": [{"queue": "q", "data": {"n": 1}}]})
    assert (pushed.status, pushed.body[0]["status"]) == (201, "queued")
    operations = [{"type": "push", "items": [{"queue": "q", "data": {"n": 2}}]}]
    done = await api.call("POST", "/api/v1/transaction", {"operations": operations})
    assert done.body["success"] is True
    assert [message["data"] for message in await api.pop("q", batch=5)] == [{"n": 1}, {"n": 2}]


async def test_payload_and_data_exclude_each_other(api: Api) -> None:
    answer = await api.call("POST", "/api/v1/push", {"items": [{"queue": "q", "payload": 1, "data": 2}]})
    assert (answer.status, answer.body["error"]) == (
        400,
        "payload and data exclude each other: send one of them (at items[0].data)",
    )


async def test_what_the_published_clients_send_is_taken(api: Api) -> None:
    pushed = await api.call(
        "POST",
        "/api/v1/push",
        {"items": [{"queue": "q", "payload": 1, "producerSub": "me", "namespace": "n", "task": "t"}]},
    )
    assert pushed.status == 201
    (message,) = await api.pop("q", namespace="n", task="t")
    ack = {"type": "ack", **{key: message[key] for key in ("transactionId", "partitionId")}}
    done = await api.call("POST", "/api/v1/transaction", {"operations": [ack], "requiredLeases": [message["leaseId"]]})
    assert done.body["success"] is True
    assert (await api.call("GET", "/api/v1/status/queues/q", includePartitions="true")).status == 200


async def test_an_item_of_a_topic_with_an_unknown_option_is_refused(api: Api) -> None:
    topics = TopicApi(api)
    await topics.enqueue(item(1))
    answer = await topics.call("POST", "/configure", {"namespace": "ns", "topic": "t", "options": {"max_retry": 1}})
    assert (answer.status, answer.body["error"]) == (
        400,
        "unknown field 'max_retry' (at options); did you mean 'max_retries'?",
    )
