"""Logging in at the server itself."""

from __future__ import annotations

from typing import Any

import aiohttp
import asyncpg
import pytest
from joserfc.jwk import OKPKey

from queen.errors import SettingsError
from queen.http.auth.guard import check_security
from queen.http.auth.keys import KeyRing, read_jwks
from queen.http.auth.principal import ClaimNames
from queen.http.auth.tokens import TokenVerifier
from queen.proxy import server_login, sessions
from queen.proxy.passwords import hash_password
from queen.proxy.users import UserStore
from queen.settings import Settings
from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, issue
from tests.proxy.conftest import PASSWORD
from tests.proxy.provider import Provider

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


async def test_the_cookie_opens_nothing_for_the_token_of_a_program(dsn: str, start_server: StartServer) -> None:
    """Else a token would open in the cookie what it is refused in the header."""
    api = await start_server(queen_login=True, jwt_secret=SECRET, jwt_audience="queen", jwt_issuer="https://q")
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        await UserStore(pool).create("alice", hash_password(PASSWORD), "admin")
    meant: dict[str, Any] = {"aud": "queen", "iss": "https://q"}
    tokens = {
        "limited": issue("read-write", queues=["mine"], **meant),
        "without a role": issue(None, **meant),
        "with scopes": issue(None, scopes=["x:read"], **meant),
        "for others": issue("admin", aud="others"),
        "unlimited": issue("admin", **meant),
    }
    async with aiohttp.ClientSession(api.url) as client:
        async with client.post("/api/login", json={"username": "alice", "password": PASSWORD}) as answer:
            session = answer.cookies["token"].value
        for kind, token in tokens.items():
            cookie = {"Cookie": f"token={token}", "Origin": api.url}
            for method, path in (("GET", "/api/v1/status"), ("GET", "/api/v1/pop/queue/q"), ("POST", "/api/v1/push")):
                async with client.request(method, path, json=PUSH, headers=cookie) as answer:
                    assert answer.status == 401, (kind, path)
        # A session is for this server, whichever way it comes.
        for headers in ({"Cookie": f"token={session}"}, {"Authorization": f"Bearer {session}"}):
            async with client.get("/api/v1/status", headers=headers) as answer:
                assert answer.status == 200, headers


@pytest.mark.parametrize("kind", ["oidc", "google"])
async def test_signing_in_with_a_provider_at_the_server_itself(
    start_server: StartServer, provider: Provider, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # Settings name no other issuer for Google than Google.
    monkeypatch.setattr("queen.proxy.settings.GOOGLE", provider.issuer)
    callback = f"https://queen.example/api/auth/{kind}/callback"
    own = {"client_id": provider.client_id, "client_secret": provider.client_secret, "redirect_uri": callback}
    own |= {"allowed_domains": "example.com", "default_role": "read-write"}
    chosen = {f"{kind}_{name}": value for name, value in own.items()} | {f"{kind}_auto_provision": True}
    api = await start_server(
        queen_login=True, jwt_secret=SECRET, oidc_issuer=provider.issuer, oidc_name="Example", **chosen
    )

    async def sign_in(client: aiohttp.ClientSession) -> str:
        """Where one is sent in the end; the server is somewhere else than where the provider sends people back to."""
        following = f"{api.url}/api/auth/{kind}?next=/queues"
        for _ in range(2):
            async with client.get(following, allow_redirects=False) as answer:
                following = answer.headers["Location"]
        back = following.replace("https://queen.example", api.url)
        async with client.get(back, headers={"Sec-Fetch-Site": "cross-site"}, allow_redirects=False) as answer:
            return answer.headers["Location"]

    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
        async with client.get(f"{api.url}/api/auth/config") as answer:
            assert (await answer.json())[kind]["enabled"]
        assert await sign_in(client) == "/queues"
        async with client.get(f"{api.url}/api/me") as answer:
            who = await answer.json()
        assert (who["username"], who["role"]) == ("eva@example.com", "read-write")
        for path, status in (("/api/v1/status", 200), ("/api/v1/audit", 403)):
            async with client.get(f"{api.url}{path}") as answer:
                assert answer.status == status
    provider.claims |= {"email": "adam@elsewhere.example", "sub": "43"}
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
        assert await sign_in(client) == "/login?error=not_allowed"


async def test_another_proxy_authenticates_requests_at_the_server(dsn: str, start_server: StartServer) -> None:
    key = OKPKey.generate_key("Ed25519").as_pem(private=True).decode()
    api = await start_server(
        queen_login=True,
        jwt_secret=SECRET,
        forward_auth_enabled=True,
        forward_auth_emit_headers="Authorization,X-Auth-User,X-Auth-Role",
        internal_jwt_private_key_pem=key,
        internal_jwt_audience="services",
        auth_host="auth.example.com",
        cookie_domain="example.com",
    )
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        await UserStore(pool).create("rita", hash_password(PASSWORD), "read-only")
    asked = {"X-Forwarded-Method": "GET", "X-Forwarded-Host": "app.example.com", "X-Forwarded-Uri": "/x"}
    async with aiohttp.ClientSession(api.url) as client:
        async with client.get("/api/auth/forward-auth", headers=asked) as answer:
            assert answer.status == 401
            assert answer.headers["X-Forward-Auth-Location"].startswith("https://auth.example.com/login?redirect_uri=")
        async with client.post("/api/login", json={"username": "rita", "password": PASSWORD}) as answer:
            cookie = {"Cookie": f"token={answer.cookies['token'].value}"}
        async with client.get("/api/auth/forward-auth", headers=asked | cookie) as answer:
            assert answer.status == 200
            assert (answer.headers["X-Auth-User"], answer.headers["X-Auth-Role"]) == ("rita", "read-only")
            minted = answer.headers["Authorization"].removeprefix("Bearer ")
        async with client.get("/.well-known/jwks.json") as answer:
            keys = [one for some in read_jwks(await answer.read()).values() for one in some]
        # It is for services, and opens nothing here.
        async with client.get("/api/v1/status", headers={"Authorization": f"Bearer {minted}"}) as answer:
            assert answer.status == 401
    verifier = TokenVerifier(KeyRing(("EdDSA",), keys), ClaimNames(), issuers=["queen-proxy"], audiences=["services"])
    assert verifier.verify(minted.encode()).subject == "rita"


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({}, ["Max-Age=86400"]),
        ({"jwt_expires_in": "7d", "cookie_domain": "example.com"}, ["Max-Age=604800", "Domain=example.com"]),
        ({"secure_cookies": True}, ["Max-Age=86400", "Secure"]),
        ({"node_env": "production"}, ["Max-Age=86400", "Secure"]),
        ({"trusted_proxies": 1}, ["Max-Age=86400", "Secure"]),
    ],
)
async def test_cookies_of_the_server_itself_are_as_the_settings_say(
    dsn: str, start_server: StartServer, settings: dict[str, Any], flags: list[str]
) -> None:
    api = await start_server(queen_login=True, jwt_secret=SECRET, **settings)
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        await UserStore(pool).create("alice", hash_password(PASSWORD), "admin")
    form = {"username": "alice", "password": PASSWORD}
    # A proxy in front that takes the TLS off is believed where there is one.
    forwarded = {"X-Forwarded-Proto": "https"}
    async with (
        aiohttp.ClientSession(api.url) as client,
        client.post("/api/login", json=form, headers=forwarded) as answer,
    ):
        said = [part.strip() for part in answer.headers["Set-Cookie"].split(";")[1:]]
    assert sorted(said) == sorted(["Path=/", "HttpOnly", "SameSite=Lax", *flags])


def test_a_login_needs_a_secret() -> None:
    with pytest.raises(SettingsError, match="JWT_SECRET is not set"):
        check_security(Settings.from_env({}, queen_login=True))


def test_a_login_needs_an_algorithm_that_admits_its_sessions() -> None:
    with pytest.raises(SettingsError, match="JWT_ALGORITHM=RS256 does not admit its sessions"):
        check_security(Settings.from_env({}, queen_login=True, jwt_secret=SECRET, jwt_algorithm="RS256"))


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
            closed = await socket.receive(timeout=100)
            assert (closed.type, closed.data) == (aiohttp.WSMsgType.CLOSE, 1008)
