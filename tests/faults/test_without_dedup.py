"""Where duplicates are allowed, those of the clients are: a retry of the server's own must not make more."""

from __future__ import annotations

import random

import pytest

from tests.conftest import StartServer
from tests.support.database import Connection, make_queue, stored_messages
from tests.support.proxy import Proxy


@pytest.mark.parametrize("count", [1, 3, 80])
async def test_a_push_whose_commit_is_unknown_is_stored_once(
    start_server: StartServer, proxy: Proxy, connection: Connection, count: int
) -> None:
    chance = random.Random(count)
    await make_queue(connection, "q", dedup_window_seconds=0)
    api = await start_server(database_urls=(proxy.dsn,))
    await api.push("q", "first", ids=["t"])
    # Incompressible and long, so that the statement is known by its length.
    payloads = [chance.randbytes(3000).hex() for _ in range(count)]
    ids = [f"t{number}" for number in range(count)]
    proxy.lose_answers(1, of=lambda sent: len(sent) > 3000)
    results = await api.push("q", *payloads, ids=ids)
    assert proxy.lost_answers == 1
    assert {result["status"] for result in results} == {"queued"}
    stored = await stored_messages(connection, "q")
    assert [message.transaction_id for message in stored] == ["t", *ids]
    assert [message.id for message in stored[1:]] == [result["message_id"] for result in results]
    # What the client sends again is stored again.
    await api.push("q", *payloads, ids=ids)
    assert len(await stored_messages(connection, "q")) == 1 + 2 * count
