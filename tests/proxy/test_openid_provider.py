"""Signing in with an OpenID provider that others wrote, in a real browser."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page

from queen.proxy.settings import OpenIdProvider
from tests.proxy.conftest import Site, StartProxy
from tests.support.node_packages import install_node_packages
from tests.support.ports import free_port

# A browser signs in with a provider of our own in test_browser.py; this one brings a hundred packages of npm.
pytestmark = pytest.mark.soak

_DIRECTORY = Path(__file__).with_name("js")


@pytest.fixture
async def site(start_proxy: StartProxy, tmp_path: Path) -> AsyncIterator[Site]:
    """A proxy whose users may sign in with the provider."""
    install_node_packages(_DIRECTORY)
    port, provider_port = free_port(), free_port()
    callback = f"http://127.0.0.1:{port}/api/auth/oidc/callback"
    log = tmp_path / "provider.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            "node",
            "provider.js",
            str(provider_port),
            callback,
            cwd=_DIRECTORY,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.strip() == b"ready":
                break
        else:
            pytest.fail(f"the provider ended with {await process.wait()} before it was ready:\n{log.read_text()}")
        issuer = f"http://127.0.0.1:{provider_port}"
        settings = OpenIdProvider("Example", issuer, "queen", "provider secret", callback)
        yield await start_proxy(oidc=settings, port=port)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def sign_in(page: Page, site: Site, name: str) -> None:
    await page.goto(f"{site.url}/login?redirect_uri=%2Fdocs")
    await page.click("text=Sign in with Example")
    await page.fill("input[name=login]", name)
    await page.fill("input[name=password]", "whatever")
    await page.click("button[type=submit]")
    await page.click("button:has-text('Continue')")


async def test_a_person_signs_in_with_a_certified_provider(site: Site, browser: Browser) -> None:
    await site.add_user("eva", "read-write", "eva@example.com")
    page = await browser.new_page()
    await sign_in(page, site, "eva")
    await page.wait_for_url(f"{site.url}/docs")
    me: Any = await page.evaluate("""async () => (await fetch("/api/me")).json()""")
    assert (me["username"], me["role"]) == ("eva", "read-write")


@pytest.mark.parametrize(("name", "error"), [("adam", "not_provisioned"), ("mallory", "not_allowed")])
async def test_an_unknown_account_is_refused(site: Site, browser: Browser, name: str, error: str) -> None:
    await site.add_user("mallory", "admin", "mallory@example.com")
    page = await browser.new_page()
    await sign_in(page, site, name)
    await page.wait_for_url(f"{site.url}/login?error={error}")
    assert await page.evaluate("""async () => (await fetch("/api/me")).status""") == 401
