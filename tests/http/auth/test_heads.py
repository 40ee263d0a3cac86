"""Who may not send a body is answered before it has come."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, issue
from tests.support.api import Api


async def answer_to_head(api: Api, *lines: str) -> int:
    """The status of the answer to a push of which only the head is sent."""
    place = urlsplit(api.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        head = ("POST /api/v1/push HTTP/1.1", "Host: localhost", *lines, "", "")
        writer.write("\r\n".join(head).encode())
        async with asyncio.timeout(100):
            return int((await reader.readuntil(b"\r\n\r\n")).split()[1])
    finally:
        writer.close()


async def test_a_body_that_may_not_be_sent_is_not_waited_for(start_server: StartServer) -> None:
    api = await start_server(jwt_enabled=True, jwt_secret=SECRET)
    assert api.worker is not None
    chunked, large, small = "Transfer-Encoding: chunked", "Content-Length: 60000000", "Content-Length: 10"
    expired = f"Authorization: Bearer {issue(lifetime=-600)}"
    reader = f"Authorization: Bearer {issue('read-only')}"
    writer = f"Authorization: Bearer {issue('read-write')}"
    assert await answer_to_head(api, large) == 401
    assert await answer_to_head(api, chunked) == 401
    assert await answer_to_head(api, small, expired) == 401
    assert await answer_to_head(api, large, expired) == 401
    assert await answer_to_head(api, large, reader) == 403
    assert await answer_to_head(api, chunked, reader, "Expect: 100-continue") == 403
    assert await answer_to_head(api, small, reader) == 403
    assert await answer_to_head(api, large, writer, "Expect: 100-continue") == 100
    assert api.worker.guard.refused["missing"] == 2
    assert api.worker.guard.refused["role"] == 3
    assert api.worker.http.statuses[401] == 4
    await api.close()


async def test_a_cookie_that_is_no_session_does_not_have_a_body_waited_for(start_server: StartServer) -> None:
    api = await start_server(queen_login=True, jwt_secret=SECRET)
    large = "Content-Length: 60000000"
    for token in ("x", "a.b.c", issue("admin"), issue("admin", username="alice", lifetime=-600)):
        assert await answer_to_head(api, large, f"Cookie: token={token}") == 401, token
    issued = issue("admin", id=1, username="alice")
    # Whether it goes on is found out when all of the request is there.
    assert await answer_to_head(api, large, f"Cookie: token={issued}", "Expect: 100-continue") == 100


async def test_a_body_that_comes_with_its_head_is_refused_and_the_connection_goes_on(start_server: StartServer) -> None:
    api = await start_server(jwt_enabled=True, jwt_secret=SECRET)
    for _ in range(2):
        assert (await api.call("POST", "/api/v1/push", {"items": []})).status == 401
    assert api.worker is not None
    assert len(api.worker.http.connections) == 1
