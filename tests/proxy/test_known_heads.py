"""Requests whose heads were seen before are passed on without being parsed, and only while they may be."""

from __future__ import annotations

import asyncio

import pytest

from queen.proxy.front import Front
from tests.proxy.conftest import Site

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was given to the parser."""
    fed: list[bytes] = []
    feed = Front._feed

    def feed_and_note(front: Front, data: bytes) -> None:
        fed.append(data)
        feed(front, data)

    monkeypatch.setattr(Front, "_feed", feed_and_note)
    return fed


async def ask(streams: Streams, credentials: str, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
    """The status and the body of the answer to a request that is sent in one piece."""
    reader, writer = streams
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", credentials, f"Content-Length: {len(body)}", "", ""]
    writer.write("\r\n".join(lines).encode() + body)
    async with asyncio.timeout(100):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split()[0])
        return int(head.split()[1]), await reader.readexactly(length if method != "HEAD" else 0)


@pytest.mark.parametrize("way", ["bearer", "cookie"])
async def test_the_like_of_a_request_is_passed_on_unparsed_until_the_session_ends(
    site: Site, parsed: list[bytes], way: str
) -> None:
    token = (await site.log_in("alice")).cookies["token"].value
    shown = (
        f"Authorization: Bearer {token}" if way == "bearer" else f"Cookie: token={token}\r\nOrigin: http://localhost"
    )
    streams = await site.connect()
    for number in range(6):
        body = b'{"items":[{"queue":"q","payload":%d}]}' % number
        assert (await ask(streams, shown, "POST", "/api/v1/push", body))[0] == 201
    before = len(parsed)
    for number in range(4):
        body = b'{"items":[{"queue":"q","payload":%d}]}' % number
        assert (await ask(streams, shown, "POST", "/api/v1/push", body))[0] == 201
    assert len(parsed) == before, "the head was known"
    for _ in range(3):
        # One that is answered without a body, and one that is longer than a packet.
        status, _ = await ask(streams, shown, "HEAD", "/api/v1/status")
        assert status == 200
        status, answer = await ask(streams, shown, "GET", "/openapi.json")
        assert (status, answer[:1], answer[-1:]) == (200, b"{", b"}")
        status, answer = await ask(streams, shown, "GET", "/api/v1/pop/queue/q?batch=3&autoAck=true")
        assert (status, answer.count(b"producerSub")) == (200, 3)
        assert (await ask(streams, shown, "POST", "/api/v1/push", b"{}"))[0] == 400
    users = site.proxy.login.users
    await users.set_role(await users.named("alice"), "read-only")
    site.proxy.login.sessions.forget()
    assert (await ask(streams, shown, "POST", "/api/v1/push", b"{}"))[0] == 403
    await users.revoke_sessions(await users.named("alice"))
    site.proxy.login.sessions.forget()
    assert (await ask(streams, shown, "GET", "/api/v1/status"))[0] == 401
    streams[1].close()


async def test_another_site_is_refused_although_the_cookie_is_known(site: Site) -> None:
    token = (await site.log_in("alice")).cookies["token"].value
    streams = await site.connect()
    body = b'{"items":[{"queue":"q","payload":1}]}'
    for origin, status in (("http://localhost", 201), ("https://evil.example", 403), ("http://[", 403)) * 3:
        cookie = f"Cookie: token={token}\r\nOrigin: {origin}"
        assert (await ask(streams, cookie, "POST", "/api/v1/push", body))[0] == status, origin
    # Nor does some other Authorization header make the cookie a token.
    basic = f"Cookie: token={token}\r\nOrigin: https://evil.example\r\nAuthorization: Basic YTpi"
    assert (await ask(streams, basic, "POST", "/api/v1/push", body))[0] == 403
    streams[1].close()


async def test_a_body_that_is_longer_or_shorter_than_the_head_says_is_read_as_ever(site: Site) -> None:
    token = (await site.log_in("alice")).cookies["token"].value
    shown, streams = f"Authorization: Bearer {token}", await site.connect()
    body = b'{"items":[{"queue":"q","payload":1}]}'
    for _ in range(4):
        assert (await ask(streams, shown, "POST", "/api/v1/push", body))[0] == 201
    reader, writer = streams
    lines = ["POST /api/v1/push HTTP/1.1", "Host: localhost", shown, f"Content-Length: {len(body)}", "", ""]
    request = "\r\n".join(lines).encode() + body
    # In two pieces, then two in one piece.
    writer.write(request[:-10])
    await asyncio.sleep(0.01)
    writer.write(request[-10:])
    for sent in (b"", request * 2, b""):
        writer.write(sent)
        async with asyncio.timeout(100):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 201")
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
    writer.close()
