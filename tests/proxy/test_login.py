"""Logging in at the proxy, and what is passed on for whom."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import asyncpg
import bcrypt
import msgspec
import pytest
from joserfc.jwk import OKPKey
from yarl import URL

from queen.http.auth.keys import KeyRing, read_jwks
from queen.http.auth.principal import ClaimNames
from queen.http.auth.tokens import TokenVerifier, read_claims
from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, issue, key_for, sign
from tests.proxy.conftest import PASSWORD, Site, StartProxy
from tests.proxy.provider import Provider
from tests.support.pausing import pause_after
from tests.support.proxy import Proxy as DatabaseProxy

PUSH = {"items": [{"queue": "q", "payload": {"n": 1}}]}


async def test_unauthenticated_requests_get_nothing(site: Site) -> None:
    async with site.client.get(f"{site.url}/api/v1/status") as answer:
        assert answer.status == 401
        assert await answer.json() == {"error": "Authentication required"}
    async with site.client.get(f"{site.url}/", headers={"Accept": "text/html"}, allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (302, "/login")
    async with site.client.get(f"{site.url}/queues", headers={"Accept": "text/html"}, allow_redirects=False) as answer:
        assert answer.headers["Location"] == "/login?redirect_uri=%2Fqueues"
    filtered = URL(f"{site.url}/queues/a%20b?text=x%26y&page=2", encoded=True)
    async with site.client.get(filtered, headers={"Accept": "text/html"}, allow_redirects=False) as answer:
        back = parse_qs(urlsplit(answer.headers["Location"]).query)["redirect_uri"][0]
        assert back == "/queues/a%20b?text=x%26y&page=2"
    assert (await (await site.log_in("alice", redirect_uri=back)).json())["redirect_uri"] == back
    async with site.client.get(f"{site.url}/api/v1/status", headers={"Authorization": "Bearer x.y.z"}) as answer:
        assert (answer.status, await answer.json()) == (401, {"error": "Invalid or expired token"})
    for path in ("/health", "/health/ready"):
        async with site.client.get(f"{site.url}{path}") as answer:
            assert await answer.json() == {"status": "ok"}


async def test_while_postgres_is_silent_a_login_is_answered_503_and_readiness_says_why(
    start_proxy: StartProxy, proxy: DatabaseProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("queen.proxy.users._STATEMENT_SECONDS", 0.5)
    site = await start_proxy(database_url=proxy.dsn)
    await site.add_user("alice", "admin")
    async with proxy.stalled():
        assert (await site.log_in("alice")).status == 503
        async with site.client.get(f"{site.url}/health/ready") as answer:
            assert answer.status == 503
            assert await answer.json() == {"status": "unavailable", "error": "PostgreSQL: no answer in time"}
    assert (await site.log_in("alice")).status == 200


async def test_a_session_opens_the_server_until_it_is_ended(site: Site) -> None:
    answer = await site.log_in("alice", redirect_uri="/queues")
    assert answer.status == 200
    assert await answer.json() == {
        "success": True,
        "user": {"username": "alice", "role": "admin"},
        "redirect_uri": "/queues",
    }
    cookie = answer.headers["Set-Cookie"]
    assert all(flag in cookie for flag in ("HttpOnly", "SameSite=Lax", "Max-Age=86400", "Path=/"))
    assert "Secure" not in cookie
    token = answer.cookies["token"].value
    async with site.client.post(f"{site.url}/api/v1/push", json=PUSH, headers={"Origin": site.url}) as pushed:
        assert pushed.status == 201, await pushed.text()
    async with site.client.get(f"{site.url}/api/v1/pop/queue/q") as popped:
        (message,) = (await popped.json())["messages"]
    assert (message["data"], message["producerSub"]) == ({"n": 1}, "alice")
    async with site.client.get(f"{site.url}/api/me") as me:
        who = await me.json()
        assert (who["username"], who["role"]) == ("alice", "admin")
    async with site.client.post(f"{site.url}/api/logout", headers={"Origin": site.url}) as out:
        assert await out.json() == {"success": True}
    # The token itself is worth nothing any more, wherever somebody kept a copy.
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as thief,
        thief.get(f"{site.url}/api/v1/status") as answer,
    ):
        assert answer.status == 401


async def test_a_request_that_is_under_way_when_its_session_ends_does_not_keep_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = (await site.log_in("alice")).cookies["token"].value
    sessions = site.proxy.login.sessions
    reached, go_on = pause_after(monkeypatch, sessions._users, "live_session")
    under_way = asyncio.create_task(sessions.identify(token))
    await reached.wait()
    async with site.client.post(f"{site.url}/api/logout", headers={"Origin": site.url}) as out:
        assert await out.json() == {"success": True}
    go_on.set()
    await under_way
    assert sessions.recall(token) is None
    assert await sessions.identify(token) is None


async def test_secure_cookies_in_production(start_proxy: StartProxy) -> None:
    site = await start_proxy(secure_cookies=True, cookie_domain="example.com")
    await site.add_user("alice", "admin")
    cookie = (await site.log_in("alice")).headers["Set-Cookie"]
    assert "Secure" in cookie
    assert "Domain=example.com" in cookie


async def test_bad_logins(site: Site) -> None:
    missing, wrong = (400, "Username and password required"), (401, "Invalid credentials")
    forms: list[tuple[dict[str, Any], tuple[int, str]]] = [
        ({}, missing),
        ({"username": "alice"}, missing),
        ({"username": "alice", "password": "wrong"}, wrong),
        ({"username": "nobody", "password": PASSWORD}, wrong),
        ({"username": ["alice"], "password": PASSWORD}, missing),
    ]
    for form, expected in forms:
        async with site.client.post(f"{site.url}/api/login", json=form) as answer:
            assert (answer.status, (await answer.json())["error"]) == expected, form
            assert "Set-Cookie" not in answer.headers


@pytest.mark.parametrize(
    "form", [b'{"username": "\xff", "password": "x"}', b'{"x": ' + b"[" * 4_000], ids=["utf8", "deep"]
)
async def test_a_form_that_cannot_be_decoded_is_a_bad_login(site: Site, form: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with site.client.post(f"{site.url}/api/login", data=form, headers=headers) as answer:
        assert (answer.status, (await answer.json())["error"]) == (400, "Username and password required")


@pytest.mark.parametrize("others", ['theme={"dark": true}', "name=J\xe9r\xf4me", "a b=1", "flag", "=x", "a[0]=1, 2"])
async def test_cookies_of_other_programs_of_the_host_end_no_session(site: Site, others: str) -> None:
    token = (await site.log_in("alice")).cookies["token"].value
    async with aiohttp.ClientSession() as other:
        for cookies in (f"{others}; token={token}", f"token={token}; {others}"):
            async with other.get(f"{site.url}/api/me", headers={"Cookie": cookies}) as answer:
                assert answer.status == 200, cookies


async def test_guessing_locks_the_user_for_a_while(site: Site) -> None:
    for _ in range(5):
        assert (await site.log_in("alice", "wrong")).status == 401
    assert (await site.log_in("alice")).status == 401, "even the right password"
    assert (await site.log_in("rita")).status == 200, "others are not concerned"


async def test_a_failed_login_does_not_reveal_whether_the_user_exists(site: Site) -> None:
    """The answers are the same, also where the user is locked, disabled or known to a provider alone."""
    users = site.proxy.login.users
    await users.create("eva", None, "admin", "eva@example.com")
    await users.create("dora", bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode(), "admin")
    await users.set_disabled(await users.named("dora"), True)
    tries = [("alice", "wrong")] * 6 + [("nobody", "wrong")] * 6
    tries += [("eva", "wrong"), ("dora", "secret"), ("no\0body", "wrong"), ("x" * 1000, "wrong"), ("a b", "wrong")]
    answers = set()
    for name, password in tries:
        answer = await site.log_in(name, password)
        answers.add((answer.status, await answer.text(), tuple(sorted(answer.headers))))
    assert len(answers) == 1, answers
    ((status, text, _),) = answers
    assert (status, text) == (401, '{"error":"Invalid credentials"}')


async def test_logins_at_the_same_time_count_before_they_have_failed(site: Site) -> None:
    answers = await asyncio.gather(*(site.log_in(f"user{number}", "wrong") for number in range(30)))
    statuses = [answer.status for answer in answers]
    assert sorted(statuses) == [401] * 20 + [429] * 10


async def test_guessing_names_is_throttled_by_address(site: Site) -> None:
    statuses = [(await site.log_in(f"user{number}", "wrong")).status for number in range(22)]
    assert statuses == [401] * 20 + [429] * 2


async def test_a_form_of_another_site_cannot_log_in(site: Site) -> None:
    body = f'{{"username":"alice","password":"{PASSWORD}"}}'
    async with site.client.post(f"{site.url}/api/login", data=body, headers={"Content-Type": "text/plain"}) as answer:
        assert answer.status == 415


async def test_another_site_cannot_use_the_cookie(site: Site) -> None:
    await site.log_in("alice")
    url = f"{site.url}/api/v1/push"
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}, {}):
        async with site.client.post(url, json=PUSH, headers=headers) as answer:
            assert answer.status == 403, headers
    async with site.client.get(f"{site.url}/api/me") as me:
        csrf = (await me.json())["csrfToken"]
    for headers in ({"X-CSRF-Token": csrf}, {"Sec-Fetch-Site": "same-origin"}):
        async with site.client.post(url, json=PUSH, headers=headers) as answer:
            assert answer.status == 201, headers


async def test_what_a_page_has_to_send_is_of_its_own_session(site: Site) -> None:
    """Also where sessions have no ids: those of an earlier proxy, and tokens of programs used as cookies."""
    sent = set()
    for token in (issue("admin"), issue("admin", sub="carol"), issue("admin", username="alice")):
        async with site.client.get(f"{site.url}/api/me", headers={"Cookie": f"token={token}"}) as me:
            sent.add((await me.json())["csrfToken"])
    assert len(sent) == 3


async def test_readers_read(site: Site) -> None:
    await site.log_in("rita")
    async with site.client.get(f"{site.url}/api/v1/status") as answer:
        assert answer.status == 200
    async with site.client.post(f"{site.url}/api/v1/push", json=PUSH, headers={"Origin": site.url}) as answer:
        assert answer.status == 403
        assert (await answer.json())["error"] == "Insufficient permissions"
    # A pop is a GET, so it is the server that refuses it.
    async with site.client.get(f"{site.url}/api/v1/pop/queue/q") as answer:
        assert answer.status == 403


async def test_bcrypt_of_the_original_is_accepted_and_upgraded(
    site: Site, connection: asyncpg.Connection[asyncpg.Record]
) -> None:
    # Six characters were enough then.
    old = bcrypt.hashpw(b"secret", bcrypt.gensalt(10)).decode()
    await site.proxy.login.users.create("old", old, "admin")
    assert (await site.log_in("old", "wrong")).status == 401
    assert (await site.log_in("old", "secret")).status == 200
    stored = await connection.fetchval("SELECT password_hash FROM queen_proxy.users WHERE username = 'old'")
    assert stored.startswith("$argon2id$")
    assert (await site.log_in("old", "secret")).status == 200


async def test_disabling_a_user_ends_what_it_began(site: Site) -> None:
    await site.log_in("alice")
    users = site.proxy.login.users
    await users.set_disabled(await users.named("alice"), True)
    site.proxy.login.sessions.forget()
    async with site.client.get(f"{site.url}/api/v1/status") as answer:
        assert answer.status == 401
    assert (await site.log_in("alice")).status == 401


async def test_headers_that_only_the_proxy_may_set(site: Site, start_proxy: StartProxy) -> None:
    """What a client claims to be never reaches the server; its cookies neither."""
    seen: list[dict[str, str]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        seen.append({k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n")[1:])})
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nSet-Cookie: token=evil\r\n\r\nok")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    site = await start_proxy(queen_server_url=f"http://127.0.0.1:{port}")
    await site.log_in("alice")
    headers = {
        "X-Proxy-User": "root",
        "X-Proxy-Role": "admin",
        "X-Auth-User": "root",
        "X-Forwarded-For": "1.2.3.4",
        "Referer": "https://secret.example",
        "X-Mine": "kept",
    }
    async with site.client.get(f"{site.url}/anything?a=%2F&b=1", headers=headers) as answer:
        assert await answer.text() == "ok"
        assert "Set-Cookie" not in answer.headers
    (head,) = seen
    assert (head["x-proxy-user"], head["x-proxy-role"], head["x-proxy-external"]) == ("alice", "admin", "false")
    assert head["x-forwarded-for"] == "127.0.0.1"
    assert head["authorization"].startswith("Bearer ey")
    assert head["x-mine"] == "kept"
    assert not {"cookie", "referer", "x-auth-user"} & head.keys()
    server.close()


async def test_an_unreachable_server_is_a_bad_gateway(start_proxy: StartProxy) -> None:
    site = await start_proxy(queen_server_url="http://127.0.0.1:1")
    await site.add_user("alice", "admin")
    await site.log_in("alice")
    async with site.client.get(f"{site.url}/api/v1/status") as answer:
        assert (answer.status, await answer.json()) == (502, {"error": "Bad gateway - Queen server unreachable"})


async def test_large_bodies_pass_in_both_directions(site: Site) -> None:
    await site.log_in("alice")
    text = "x" * 3_000_000
    body = {"items": [{"queue": "big", "payload": text}]}
    async with site.client.post(f"{site.url}/api/v1/push", json=body, headers={"Origin": site.url}) as answer:
        assert answer.status == 201
    async with site.client.get(f"{site.url}/api/v1/pop/queue/big") as answer:
        assert (await answer.json())["messages"][0]["data"] == text


async def test_a_websocket_passes(site: Site) -> None:
    await site.log_in("alice")
    async with site.client.post(f"{site.url}/api/v1/push", json=PUSH, headers={"Origin": site.url}):
        pass
    url = f"{site.url}/ws/v1/consume"
    async with site.client.ws_connect(url, protocols=["queen.v1"], headers={"Origin": site.url}) as socket:
        await socket.send_json({"type": "subscribe", "id": "s", "queue": "q"})
        kinds = [(await socket.receive_json())["type"] for _ in range(2)]
        assert kinds == ["subscribed", "batch"]
    with pytest.raises(aiohttp.WSServerHandshakeError):
        await site.client.ws_connect(url, headers={"Origin": "https://evil.example"})


async def test_tokens_of_an_identity_provider_pass_unchanged(start_proxy: StartProxy, provider: Provider) -> None:
    site = await start_proxy(external_jwks_url=f"{provider.issuer}/keys", external_issuer=("https://idp",))
    good = provider.sign({"iss": "https://idp", "sub": "7", "preferred_username": "pia", "roles": ["read-write"]})
    headers = {"Authorization": f"Bearer {good}"}
    async with site.client.get(f"{site.url}/api/me", headers=headers) as answer:
        who = await answer.json()
        assert (who["username"], who["role"]) == ("pia", "read-write")
    for bad in (
        provider.sign({"iss": "https://other", "sub": "7", "role": "admin"}),
        sign({"iss": "https://idp", "role": "admin"}, key_for("RS256"), "RS256", kid="one"),
        issue("admin", secret="some other secret of 32 bytes or more"),
    ):
        async with site.client.get(f"{site.url}/api/me", headers={"Authorization": f"Bearer {bad}"}) as answer:
            assert answer.status == 401
    await site.add_user("alice", "admin")
    await site.log_in("alice")
    async with site.client.get(f"{site.url}/api/v1/status") as answer:
        assert answer.status == 200, "sessions work beside them"


async def test_tokens_of_programs_pass_unchanged(start_proxy: StartProxy) -> None:
    """Those of `queen token create`, with all that limits them; not those that are minted for other services."""
    claims = (("sub", "sub"), ("role", "role"), ("username", "username"))
    site = await start_proxy(forward_auth=True, internal_claims=claims)
    url = f"{site.url}/api/v1/push"
    limited = {"Authorization": f"Bearer {issue('read-write', queues=['q'])}"}
    for queue, status in (("q", 201), ("other", 403)) * 3:
        async with site.client.post(url, json={"items": [{"queue": queue, "payload": 1}]}, headers=limited) as answer:
            assert answer.status == status, queue
    for bad, status in (
        (issue("read-only"), 403),
        (issue("admin", lifetime=-600), 401),
        (issue("admin", secret="some other secret of 32 bytes or more"), 401),
    ):
        async with site.client.post(url, json=PUSH, headers={"Authorization": f"Bearer {bad}"}) as answer:
            assert answer.status == status
    await site.add_user("alice", "admin")
    token = (await site.log_in("alice")).cookies["token"].value
    async with site.client.get(f"{site.url}/api/auth/forward-auth", headers={"Cookie": f"token={token}"}) as answer:
        minted = answer.headers["Authorization"]
    site.client.cookie_jar.clear()
    async with site.client.post(url, json=PUSH, headers={"Authorization": minted}) as answer:
        assert answer.status == 401


async def test_a_server_that_asks_more_of_tokens_accepts_sessions(
    start_proxy: StartProxy, start_server: StartServer
) -> None:
    """An issuer, an audience, and roles of other names: what is set for both counts for sessions, too."""
    said = {"jwt_issuer": ("https://q", "https://idp"), "jwt_audience": ("queen",)}
    server = await start_server(
        jwt_enabled=True, jwt_secret=SECRET, jwt_roles_claim="post", jwt_role_read_write="clerk", **said
    )
    names = ClaimNames(role="post", read_write="clerk")
    site = await start_proxy(queen_server_url=server.url, claim_names=names, **said)
    await site.add_user("carl", "read-write")
    token = (await site.log_in("carl")).cookies["token"].value
    meant: dict[str, Any] = {"iss": "https://idp", "aud": "queen", "post": "clerk"}
    older = issue("read-write", id=1, username="carl")
    url = f"{site.url}/api/v1/push"
    for bearer, status in (
        (token, 201),
        (older, 201),
        (issue(None, **meant), 201),
        (issue(None, **meant | {"aud": "others"}), 401),
        (issue("read-write", **meant | {"post": "visitor"}), 403),
    ):
        async with site.client.post(url, json=PUSH, headers={"Authorization": f"Bearer {bearer}"}) as answer:
            assert answer.status == status, await answer.text()
    async with site.client.post(url, json=PUSH, headers={"Origin": site.url}) as answer:
        assert answer.status == 201, "with the cookie"


async def test_what_is_minted_for_a_limited_token_has_its_limits(start_proxy: StartProxy) -> None:
    site = await start_proxy(forward_auth=True, forward_auth_always_mint=True)
    url = f"{site.url}/api/auth/forward-auth"
    limits: dict[str, Any] = {"queues": ["mine.*"], "namespaces": ["n"], "groups": ["g"], "scopes": ["n:read"]}
    for role, carried in (("read-write", limits), (None, {"scopes": ["n:read"]}), (None, {})):
        token = issue(role, lifetime=60, **carried)
        for shown in ({"Authorization": f"Bearer {token}"}, {"Cookie": f"token={token}"}):
            async with site.client.get(url, headers=shown) as answer:
                assert answer.status == 200
                minted = answer.headers["Authorization"].removeprefix("Bearer ")
            _, claims = read_claims(minted.encode())
            assert {name: claims.get(name) for name in limits} == {name: carried.get(name) for name in limits}
            assert claims.get("role") == role
            assert claims["exp"] <= read_claims(token.encode())[1]["exp"] + 30, "with the skew"


async def test_safe_redirects_after_logging_in(start_proxy: StartProxy) -> None:
    site = await start_proxy(cookie_domain=".example.com", forward_auth_redirect_hosts=("partner.example",))
    await site.add_user("alice", "admin")
    for target, safe in (
        ("/queues", True),
        ("/a?b=//c", True),
        ("//evil.example", False),
        ("/\\evil.example", False),
        ("https://evil.example", False),
        ("https://app.example.com/x", True),
        ("https://example.com.evil.example", False),
        ("https://evil.example@app.example.com", False),
        ("https://partner.example/x", True),
        ("javascript:alert(1)", False),
        ("https://app.example.com\r\nX: y", False),
        ("", False),
    ):
        answer = await (await site.log_in("alice", redirect_uri=target)).json()
        assert answer["redirect_uri"] == (target if safe else None), target


async def test_forward_auth(start_proxy: StartProxy) -> None:
    site = await start_proxy(
        forward_auth=True,
        queen_server_url="",
        auth_host="auth.example.com",
        cookie_domain="example.com",
        forward_auth_headers=("Authorization", "X-Auth-User", "X-Auth-Role"),
    )
    await site.add_user("rita", "read-only")
    url = f"{site.url}/api/auth/forward-auth"
    asked = {
        "X-Forwarded-Method": "GET",
        "X-Forwarded-Proto": "https",
        "X-Forwarded-Host": "app.example.com",
        "X-Forwarded-Uri": "/x?y=1",
    }
    async with site.client.get(url, headers=asked) as answer:
        assert answer.status == 401
        assert answer.headers["X-Forward-Auth-Location"].startswith("https://auth.example.com/login?redirect_uri=https")
    browser = asked | {"Accept": "text/html"}
    async with site.client.get(url, headers=browser, allow_redirects=False) as answer:
        assert answer.headers["Location"].endswith("redirect_uri=https%3A%2F%2Fapp.example.com%2Fx%3Fy%3D1")
    token = (await site.log_in("rita")).cookies["token"].value
    cookie = {"Cookie": f"token={token}"}
    async with site.client.get(url, headers=asked | cookie) as answer:
        assert answer.status == 200
        assert answer.headers["X-Auth-User"] == "rita"
        assert answer.headers["X-Auth-Role"] == "read-only"
        minted = answer.headers["Authorization"].removeprefix("Bearer ")
        assert minted != token
    # A password for the service behind is not what says who asks.
    async with site.client.get(url, headers=asked | cookie | {"Authorization": "Basic cml0YTpwYXNz"}) as answer:
        assert answer.status == 200
        assert answer.headers["Authorization"] not in (f"Bearer {token}", "Basic cml0YTpwYXNz")
    narrowed = asked | cookie | {"X-Forward-Auth-Headers": "X-Auth-User"}
    async with site.client.get(url, headers=narrowed) as answer:
        assert "Authorization" not in answer.headers
    rbac = asked | cookie | {"X-Forward-Auth-RBAC": "method", "X-Forwarded-Method": "DELETE"}
    async with site.client.get(url, headers=rbac) as answer:
        assert answer.status == 403
    async with site.client.get(f"{site.url}/anything", headers=cookie) as answer:
        assert (answer.status, await answer.json()) == (404, {"error": "not_found", "mode": "forward-auth-only"})


@pytest.mark.parametrize("always", [False, True])
async def test_forward_auth_gives_services_the_token_of_the_caller_or_one_of_its_own(
    start_proxy: StartProxy, always: bool
) -> None:
    site = await start_proxy(forward_auth=True, forward_auth_always_mint=always, internal_audience="services")
    await site.add_user("rita", "read-only")
    token = (await site.log_in("rita")).cookies["token"].value
    site.client.cookie_jar.clear()
    url, bearer = f"{site.url}/api/auth/forward-auth", {"Authorization": f"Bearer {token}"}
    async with site.client.get(url, headers=bearer) as answer:
        given = answer.headers["Authorization"].removeprefix("Bearer ")
    assert (given == token) is not always
    _, claims = read_claims(given.encode())
    assert claims.get("aud") == ("services" if always else None)
    async with site.client.get(url, headers={"Authorization": "Bearer a.b.c"}) as answer:
        assert answer.status == 401


async def test_what_is_minted_is_verified_with_the_published_key(start_proxy: StartProxy) -> None:
    key = OKPKey.generate_key("Ed25519")
    site = await start_proxy(forward_auth=True, internal_key_pem=key.as_pem(private=True).decode())
    await site.add_user("rita", "read-only")
    token = (await site.log_in("rita")).cookies["token"].value
    async with site.client.get(f"{site.url}/.well-known/jwks.json") as answer:
        (published,) = (await answer.json())["keys"]
        assert answer.headers["Cache-Control"] == "public, max-age=300"
        assert (published["kty"], published["alg"], "d" in published) == ("OKP", "EdDSA", False)
    async with site.client.get(f"{site.url}/api/auth/forward-auth", headers={"Cookie": f"token={token}"}) as answer:
        minted = answer.headers["Authorization"].removeprefix("Bearer ")
    keys = [key for some in read_jwks(msgspec.json.encode({"keys": [published]})).values() for key in some]
    verifier = TokenVerifier(KeyRing(("EdDSA",), keys), ClaimNames(), issuers=["queen-proxy"])
    claims = verifier.check(minted.encode()).claims
    assert (claims["sub"], claims["role"], claims["preferred_username"]) == ("rita", "read-only", "rita")


async def test_logins_are_in_the_audit_log(site: Site, connection: asyncpg.Connection[asyncpg.Record]) -> None:
    await site.log_in("alice", "wrong")
    await site.log_in("alice")
    rows = await connection.fetch("SELECT actor, address, action, object FROM queen.audit ORDER BY id")
    assert [tuple(row) for row in rows] == [
        (None, "127.0.0.1", "login failed", "alice"),
        ("alice", "127.0.0.1", "login", "alice"),
    ]
