"""Transactions whose answers are lost."""

from __future__ import annotations

from typing import Any

import pytest

from queen import Queen, QueenConnectionError, TransactionError
from tests.client.conftest import MakeClient, url_of
from tests.support.api import Api
from tests.support.proxy import TcpProxy


def of_commit(sent: bytes) -> bool:
    return b"/transaction" in sent


async def payloads(queen: Queen, queue: str) -> list[Any]:
    return [message["data"] for message in await queen.queue(queue).batch(10).wait(False).pop()]


async def test_commit_whose_answer_was_lost_is_applied_once(
    queen: Queen, make_client: MakeClient, wire: TcpProxy
) -> None:
    await queen.queue("in").push([{"data": 1}, {"data": 2}])
    messages = await queen.queue("in").batch(2).pop()
    far = make_client(url_of(wire))
    for message in messages:
        wire.lose_answers(1, of_commit)
        answer = await far.transaction().ack(message).queue("out").push({"data": message["data"] * 10}).commit()
        assert answer["success"] is True
    assert wire.lost_answers == 2
    assert await payloads(queen, "out") == [10, 20]
    assert await payloads(queen, "in") == []


async def test_commit_that_may_have_been_applied_says_so(queen: Queen, make_client: MakeClient, wire: TcpProxy) -> None:
    await queen.queue("in").push([{"data": 1}, {"data": 2}])
    messages = await queen.queue("in").batch(2).pop()
    far = make_client(url_of(wire))
    wire.lose_answers(1, of_commit)
    with pytest.raises(QueenConnectionError, match="may have been applied"):
        await far.transaction().ack(messages[0], "failed").commit()


async def test_id_that_was_there_before_refuses_the_whole(api: Api, queen: Queen) -> None:
    await api.push("out", "first", ids=["mine"])
    with pytest.raises(TransactionError, match="mine"):
        await queen.transaction().queue("out").push([{"data": 1}, {"data": 2, "transactionId": "mine"}]).commit()
    assert await payloads(queen, "out") == ["first"]
