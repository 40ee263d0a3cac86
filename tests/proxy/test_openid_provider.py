"""Signing in with an OpenID provider that others wrote, in a real browser."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page

from queen.proxy.settings import OpenIdProvider
from tests.proxy.conftest import Site, StartProxy
from tests.support.ports import free_port

_DIRECTORY = Path(__file__).with_name("js")


@pytest.fixture(scope="module")
def installed() -> None:
    """The provider, from npm."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not on the PATH")
    done = subprocess.run(["npm", "install", "--silent"], cwd=_DIRECTORY, capture_output=True, text=True)
    if done.returncode:
        if "E404" in done.stderr:
            pytest.skip("the npm registry in use has no package oidc-provider")
        pytest.fail(f"npm install failed in {_DIRECTORY}:\n{done.stdout}{done.stderr}")


@pytest.fixture
async def site(installed: None, start_proxy: StartProxy) -> AsyncIterator[Site]:
    """A proxy whose users may sign in with the provider."""
    port, provider_port = free_port(), free_port()
    callback = f"http://127.0.0.1:{port}/api/auth/oidc/callback"
    process = await asyncio.create_subprocess_exec(
        "node",
        "provider.js",
        str(provider_port),
        callback,
        cwd=_DIRECTORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.strip() == b"ready":
                break
        issuer = f"http://127.0.0.1:{provider_port}"
        settings = OpenIdProvider("Example", issuer, "queen", "provider secret", callback)
        yield await start_proxy(oidc=settings, port=port)
    finally:
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
async def test_whom_nobody_knows_is_not_let_in(site: Site, browser: Browser, name: str, error: str) -> None:
    await site.add_user("mallory", "admin", "mallory@example.com")
    page = await browser.new_page()
    await sign_in(page, site, name)
    await page.wait_for_url(f"{site.url}/login?error={error}")
    assert await page.evaluate("""async () => (await fetch("/api/me")).status""") == 401
