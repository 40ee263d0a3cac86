"""Logging in with a real browser, by password and with a real OpenID provider."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import asyncpg
import pytest
from playwright.async_api import Browser
from yarl import URL

from queen.proxy.passwords import hash_password
from queen.proxy.settings import OpenIdProvider
from queen.proxy.users import UserStore
from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET
from tests.proxy.conftest import PASSWORD, Site, StartProxy
from tests.proxy.provider import Provider
from tests.support.ports import free_port


async def with_provider(start_proxy: StartProxy, provider: Provider, **options: Any) -> Site:
    port = free_port()
    settings = OpenIdProvider(
        "Example",
        provider.issuer,
        provider.client_id,
        provider.client_secret,
        f"http://127.0.0.1:{port}/api/auth/oidc/callback",
        **options,
    )
    return await start_proxy(oidc=settings, port=port)


async def test_a_person_logs_in_and_out(site: Site, browser: Browser) -> None:
    page = await browser.new_page()
    await page.goto(f"{site.url}/docs")
    await page.wait_for_url(f"{site.url}/login?redirect_uri=%2Fdocs")
    await page.fill("input[name=username]", "alice")
    await page.fill("input[name=password]", "wrong")
    await page.click("button")
    await page.wait_for_selector("text=Invalid credentials")
    await page.fill("input[name=password]", PASSWORD)
    await page.click("button")
    await page.wait_for_url(f"{site.url}/docs")
    push = """async () => (await fetch("/api/v1/push", {method: "POST", headers: {"Content-Type": "application/json"},
        body: JSON.stringify({items: [{queue: "q", payload: 1}]})})).status"""
    assert await page.evaluate(push) == 201
    assert await page.evaluate("document.cookie") == "", "no script can read the session"
    assert await page.evaluate("""async () => (await fetch("/api/logout", {method: "POST"})).status""") == 200
    assert await page.evaluate(push) == 401


async def test_a_page_of_another_origin_can_do_nothing_with_the_session(site: Site, browser: Browser) -> None:
    page = await browser.new_page()
    await page.goto(f"{site.url}/login")
    await page.fill("input[name=username]", "alice")
    await page.fill("input[name=password]", PASSWORD)
    await page.click("button")
    await page.wait_for_url(lambda url: "/login" not in url)
    # The same machine by another name is another origin, and another site.
    evil = site.url.replace("127.0.0.1", "localhost")
    await page.goto(f"{evil}/login")
    attack = f"""async () => {{
        try {{
            const answer = await fetch("{site.url}/api/v1/push", {{method: "POST", credentials: "include",
                mode: "no-cors", body: JSON.stringify({{items: [{{queue: "stolen", payload: 1}}]}})}});
            return answer.type;
        }} catch (error) {{ return String(error); }}
    }}"""
    await page.evaluate(attack)
    socket = f"""() => new Promise((done) => {{
        const socket = new WebSocket("{site.url.replace("http", "ws")}/ws/v1/consume", "queen.v1");
        socket.onopen = () => done("open");
        socket.onerror = () => done("refused");
    }})"""
    assert await page.evaluate(socket) == "refused"
    await site.log_in("alice")
    async with site.client.get(f"{site.url}/api/v1/pop/queue/stolen") as answer:
        assert answer.status == 204


async def test_a_person_signs_in_with_an_openid_provider(
    start_proxy: StartProxy, provider: Provider, browser: Browser
) -> None:
    site = await with_provider(start_proxy, provider, auto_provision=True, default_role="read-write")
    page = await browser.new_page()
    await page.goto(f"{site.url}/login?redirect_uri=%2Fdocs")
    await page.click("text=Sign in with Example")
    await page.wait_for_url(f"{site.url}/docs")
    me: Any = await page.evaluate("""async () => (await fetch("/api/me")).json()""")
    assert (me["username"], me["role"]) == ("eva@example.com", "read-write")


async def test_a_provider_that_wants_the_secret_in_a_header_and_has_a_policy(
    start_proxy: StartProxy, provider: Provider
) -> None:
    provider.basic, provider.policy, provider.client_id, provider.client_secret = True, "b2c 1", "queen:1", "a:b+c d%"
    site = await with_provider(start_proxy, provider, auto_provision=True)
    async with site.client.get(f"{site.url}/api/auth/oidc"):
        pass
    async with site.client.get(f"{site.url}/api/me") as answer:
        assert (await answer.json())["username"] == "eva@example.com"


@pytest.mark.parametrize(
    ("claims", "options", "error"),
    [
        ({}, {}, "not_provisioned"),
        ({"email_verified": False}, {"auto_provision": True}, "not_allowed"),
        ({}, {"auto_provision": True, "allowed_domains": ("other.example",)}, "not_allowed"),
        ({}, {"auto_provision": True, "allowed_emails": ("/^adam@/",)}, "not_allowed"),
        ({"aud": "another client"}, {"auto_provision": True}, "google_failed"),
        ({"iss": "https://other"}, {"auto_provision": True}, "google_failed"),
        ({"nonce": "replayed"}, {"auto_provision": True}, "invalid_state"),
    ],
)
async def test_a_refused_sign_in_says_why(
    start_proxy: StartProxy, provider: Provider, claims: dict[str, Any], options: dict[str, Any], error: str
) -> None:
    provider.claims |= claims
    provider.nonce = claims.get("nonce")
    site = await with_provider(start_proxy, provider, **options)
    async with site.client.get(f"{site.url}/api/auth/oidc") as answer:
        assert answer.url.path == "/login"
        assert answer.url.query["error"] == error
    async with site.client.get(f"{site.url}/api/me") as answer:
        assert answer.status == 401


async def test_an_account_is_linked_by_a_verified_address(start_proxy: StartProxy, provider: Provider) -> None:
    site = await with_provider(start_proxy, provider)
    await site.add_user("eva", "admin", "Eva@example.com")
    for email in ("eva@example.com", "eva@renamed.example"):
        provider.claims["email"] = email
        async with site.client.get(f"{site.url}/api/auth/oidc", allow_redirects=True):
            pass
        async with site.client.get(f"{site.url}/api/me") as answer:
            assert (await answer.json())["username"] == "eva", "by the address, and then by the identity"
    # The address now belongs to another person.
    provider.claims |= {"email": "eva@example.com", "sub": "43"}
    site.client.cookie_jar.clear()
    async with site.client.get(f"{site.url}/api/auth/oidc") as answer:
        assert answer.url.query["error"] == "not_allowed"
    async with site.client.get(f"{site.url}/api/me") as answer:
        assert answer.status == 401
    # Another provider that vouches for it is one that was set.
    await site.proxy.login.users.link_identity(await site.proxy.login.users.named("eva"), "https://former 42")
    async with site.client.get(f"{site.url}/api/auth/oidc"), site.client.get(f"{site.url}/api/me") as answer:
        assert (await answer.json())["username"] == "eva"


@pytest.mark.parametrize(
    ("email", "name"),
    [("Conan.O'Brien@example.com", "Conan.O_Brien@example.com"), ("a/b{c}=d@e.org", "a_b_c__d@e.org")],
)
async def test_a_user_is_made_for_every_address(
    start_proxy: StartProxy, provider: Provider, email: str, name: str
) -> None:
    site = await with_provider(start_proxy, provider, auto_provision=True)
    provider.claims["email"] = email
    for _ in range(2):
        async with site.client.get(f"{site.url}/api/auth/oidc") as answer:
            assert answer.status != 500, await answer.text()
        async with site.client.get(f"{site.url}/api/me") as answer:
            assert (await answer.json())["username"] == name
    assert [user["email"] for user in await site.proxy.login.users.all()] == [email]


@pytest.mark.parametrize("email", ["alice@example.com", "x" * 300 + "@example.com", "a\0b@example.com"])
async def test_a_user_that_cannot_be_made_is_not_signed_in(
    start_proxy: StartProxy, provider: Provider, email: str
) -> None:
    site = await with_provider(start_proxy, provider, auto_provision=True)
    # Of the same name, and without an address: somebody else, as far as anybody knows.
    await site.add_user("alice@example.com", "admin")
    provider.claims["email"] = email
    async with site.client.get(f"{site.url}/api/auth/oidc") as answer:
        assert (answer.status, answer.url.path, answer.url.query["error"]) == (200, "/login", "not_allowed")
    async with site.client.get(f"{site.url}/api/me") as answer:
        assert answer.status == 401


async def test_concurrent_first_sign_ins_create_one_user(start_proxy: StartProxy, provider: Provider) -> None:
    site = await with_provider(start_proxy, provider, auto_provision=True)

    async def sign_in() -> str:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
            async with browser.get(f"{site.url}/api/auth/oidc"):
                pass
            async with browser.get(f"{site.url}/api/me") as answer:
                return str((await answer.json()).get("username"))

    assert set(await asyncio.gather(*(sign_in() for _ in range(8)))) == {"eva@example.com"}
    assert len(await site.proxy.login.users.all()) == 1


async def test_an_unsolicited_callback_signs_no_user_in(start_proxy: StartProxy, provider: Provider) -> None:
    site = await with_provider(start_proxy, provider, auto_provision=True)
    callback = f"{site.url}/api/auth/oidc/callback"
    async with site.client.get(f"{callback}?code=x&state=y", allow_redirects=False) as answer:
        assert answer.headers["Location"] == "/login?error=invalid_state"
    async with site.client.get(f"{site.url}/api/auth/oidc", allow_redirects=False) as answer:
        assert "code_challenge=" in answer.headers["Location"]
    for forged in ("forged", "%C3%A9", "%FF"):
        async with site.client.get(f"{site.url}/api/auth/oidc", allow_redirects=False):
            pass
        async with site.client.get(URL(f"{callback}?code=x&state={forged}", encoded=True), allow_redirects=False) as (
            answer
        ):
            assert answer.headers["Location"] == "/login?error=invalid_state", forged
    async with site.client.get(f"{site.url}/api/auth/google", allow_redirects=False) as answer:
        assert answer.status == 503


@pytest.mark.parametrize(
    "callback", ["/api/auth/google/callback", "/api/oauth/callback/google", "/api/auth/callback/google"]
)
async def test_google_is_a_provider_with_routes_of_its_own(
    start_proxy: StartProxy, provider: Provider, callback: str
) -> None:
    port = free_port()
    google = OpenIdProvider(
        "Google",
        provider.issuer,
        provider.client_id,
        provider.client_secret,
        f"http://127.0.0.1:{port}{callback}",
        allowed_domains=("example.com",),
        auto_provision=True,
    )
    site = await start_proxy(google=google, port=port)
    async with site.client.get(f"{site.url}/api/auth/config") as answer:
        assert (await answer.json())["google"] == {"enabled": True, "hasEmailAllowlist": False}
    # The domain of the workspace counts, as well as that of the address.
    provider.claims |= {"hd": "example.com", "email": "eva@mail.example"}
    async with site.client.get(f"{site.url}/api/auth/google?next=/docs") as answer:
        assert (answer.status, answer.url.path) == (200, "/docs")
    async with site.client.get(f"{site.url}/api/me") as answer:
        who = await answer.json()
    assert (who["username"], who["role"]) == ("eva@mail.example", "read-only")
    provider.claims |= {"hd": "other.example", "sub": "43"}
    async with site.client.get(f"{site.url}/api/auth/google") as answer:
        assert answer.url.query["error"] == "not_allowed"


async def test_a_person_logs_in_at_the_server_itself(dsn: str, start_server: StartServer, browser: Browser) -> None:
    api = await start_server(queen_login=True, jwt_secret=SECRET)
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        await UserStore(pool).create("alice", hash_password(PASSWORD), "admin")
    page = await browser.new_page()
    await page.goto(f"{api.url}/queues")
    await page.wait_for_url(f"{api.url}/login?redirect_uri=%2Fqueues")
    await page.fill("input[name=username]", "alice")
    await page.fill("input[name=password]", PASSWORD)
    await page.click("button")
    await page.wait_for_url(f"{api.url}/queues")
    push = """async () => (await fetch("/api/v1/push", {method: "POST", headers: {"Content-Type": "application/json"},
        body: JSON.stringify({items: [{queue: "q", payload: 1}]})})).status"""
    assert await page.evaluate(push) == 201
    socket = f"""() => new Promise((done) => {{
        const socket = new WebSocket("{api.url.replace("http", "ws")}/ws/v1/consume", "queen.v1");
        socket.onopen = () => done("open");
        socket.onerror = () => done("refused");
    }})"""
    assert await page.evaluate(socket) == "open"
    assert await page.evaluate("document.cookie") == ""
    token = (await page.context.cookies())[0]["value"]
    assert await page.evaluate("""async () => (await fetch("/api/logout", {method: "POST"})).status""") == 200
    assert await page.evaluate(push) == 401
    thief = api.bearing(token)
    refused = await thief.call("GET", "/api/v1/status")
    await thief.close()
    assert (refused.status, refused.body["error"]) == (401, "The session has ended")
