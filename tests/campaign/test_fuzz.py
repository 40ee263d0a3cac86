"""The fuzzer itself, and some thousand of its requests."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from queen.http.sqs.endpoint import ACTIONS
from tests.acceptance.served import served
from tests.campaign.fuzz import SETTINGS, Mutator, fuzz, is_complete, is_framed
from tests.campaign.sqs_requests import good_calls


async def test_mutated_requests_and_frames_never_harm_the_server(tmp_path: Path) -> None:
    with served(tmp_path, **SETTINGS) as server:
        findings = await fuzz(server, requests=3000, seed=16)
    assert not findings.failures, findings.text()
    assert findings.statuses[200] > 50, findings.text()
    assert findings.statuses[400] > 500, findings.text()


def test_every_action_of_sqs_is_recorded() -> None:
    assert {action for action, _ in good_calls("q", "handle", {}, "dead", "arn")} == set(ACTIONS)


def test_the_same_seed_makes_the_same_requests() -> None:
    good = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 7\r\n\r\n" + b'{"a":1}'

    def some(seed: int) -> list[bytes]:
        mutator = Mutator(random.Random(seed), [good])
        return [mutator.request() for _ in range(50)]

    assert some(1) == some(1) != some(2)
    assert len(set(some(1)) - {good}) > 40
    assert sum(map(is_complete, some(1))) > 25


def test_a_request_that_does_not_end_need_not_be_answered() -> None:
    assert is_complete(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nab")
    assert not is_complete(b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nab")
    assert not is_complete(b"POST / HTTP/1.1\r\nContent-Length: 3\r\n")
    assert not is_complete(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nab")


def test_a_connection_is_kept_only_after_a_request_whose_end_both_sides_know() -> None:
    head = b"POST /a?b=%00 HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    assert is_framed(head + b"2\r\n\r\n{}")
    assert not is_framed(head + b"3\r\n\r\n{}")
    assert not is_framed(head + b"2\r\nExpect: 100-continue\r\n\r\n{}")
    assert not is_framed(head.replace(b"POST", b"HEAD") + b"2\r\n\r\n{}")
    assert not is_framed(head.replace(b"?", b" ") + b"2\r\n\r\n{}")


def test_documents_are_mutated_into_other_documents() -> None:
    document = b'{"items":[{"queue":"q","payload":{"a":[1,2]}}],"options":{}}'
    mutator = Mutator(random.Random(1), [b"GET / HTTP/1.1\r\n\r\n"])
    made = {mutator.mutate_json(document) for _ in range(2000)}
    assert len(made) > 300
    for one in made:
        msgspec.json.decode(one)
