"""Logging in at the server itself."""

from __future__ import annotations

import aiohttp
import asyncpg
import pytest

from queen.errors import SettingsError
from queen.http.auth.guard import check_security
from queen.proxy import server_login, sessions
from queen.proxy.passwords import hash_password
from queen.proxy.users import UserStore
from queen.settings import Settings
from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, issue
from tests.proxy.conftest import PASSWORD

PUSH = {"items": [{"queue": "q", "payload": 1}]}


async def test_a_session_of_the_server_itself(dsn: str, start_server: StartServer) -> None:
    api = await start_server(queen_login=True, jwt_secret=SECRET)
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        await UserStore(pool).create("alice", hash_password(PASSWORD), "admin")
    async with aiohttp.ClientSession(api.url, cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
        async with client.get("/api/v1/status") as answer:
            assert answer.status == 401
        async with client.get("/", headers={"Accept": "text/html"}, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (302, "/login")
        async with client.get("/login") as answer:
            assert "Log in" in await answer.text()
        async with client.post("/api/login", json={"username": "alice", "password": "wrong"}) as answer:
            assert answer.status == 401
        async with client.post("/api/login", json={"username": "alice", "password": PASSWORD}) as answer:
            assert answer.status == 200
            assert "HttpOnly" in answer.headers["Set-Cookie"]
        async with client.get("/api/v1/status") as answer:
            assert answer.status == 200
        for origin, status in ((api.url, 201), ("https://evil.example", 403), (None, 403)):
            headers = {"Origin": origin} if origin else {}
            async with client.post("/api/v1/push", json=PUSH, headers=headers) as answer:
                assert answer.status == status, origin
        async with client.get("/api/v1/pop/queue/q") as answer:
            assert (await answer.json())["messages"][0]["producerSub"] == "alice"
        async with client.post("/api/logout", headers={"Origin": api.url}) as answer:
            assert answer.status == 200
        async with client.get("/api/v1/status") as answer:
            assert answer.status == 401
        async with client.get("/api/v1/status", headers={"Authorization": f"Bearer {issue('read-only')}"}) as answer:
            assert answer.status == 200, "programs send tokens as ever"


def test_a_login_needs_a_secret() -> None:
    with pytest.raises(SettingsError, match="JWT_SECRET is not set"):
        check_security(Settings.from_env({}, queen_login=True))


async def test_a_websocket_ends_with_its_session(
    dsn: str, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_login, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(sessions, "_LIVE_SECONDS", 0.0)
    api = await start_server(queen_login=True, jwt_secret=SECRET)
    async with (
        asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool,
        aiohttp.ClientSession(api.url, cookie_jar=aiohttp.CookieJar(unsafe=True)) as client,
    ):
        users = UserStore(pool)
        user = await users.create("alice", hash_password(PASSWORD), "admin")
        async with client.post("/api/login", json={"username": "alice", "password": PASSWORD}):
            pass
        own = {"Origin": api.url}
        async with client.ws_connect("/ws/v1/consume", protocols=["queen.v1"], headers=own) as socket:
            await users.revoke_sessions(user)
            closed = await socket.receive(timeout=20)
            assert (closed.type, closed.data) == (aiohttp.WSMsgType.CLOSE, 1008)
