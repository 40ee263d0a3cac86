"""A server whose tokens come from an identity provider: its keys change, and it is not always there."""

from __future__ import annotations

import asyncio
import base64
import hmac
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import pytest
from aiohttp import web
from joserfc.jwk import Key

from queen.http.auth import keys
from tests.conftest import StartServer
from tests.http.auth.issuer import forge, jwks, key_for, public_pem, sign
from tests.support.ageing import until
from tests.support.api import Answer, Api
from tests.support.ports import free_port

CLAIMS = {"sub": "me", "role": "read-only"}


class Provider:
    """Publishes keys at a port of its own, unless it is down."""

    def __init__(self, **published: Key) -> None:
        self.keys = published
        self.asked = 0
        self.port = free_port()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/keys"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/keys", self._publish)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _publish(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(text=jwks(**self.keys), content_type="application/json")


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    provider = Provider(one=key_for("ES256"))
    yield provider
    await provider.stop()


async def status(api: Api, token: str) -> Answer:
    caller = api.bearing(token)
    try:
        return await caller.call("GET", "/api/v1/status")
    finally:
        await caller.close()


def token_of(provider: Provider, kid: str = "one", algorithm: str = "ES256", **claims: Any) -> str:
    return sign(CLAIMS | claims, provider.keys[kid], algorithm, kid=kid)


async def test_a_provider_that_is_away_at_the_start_is_waited_for(
    provider: Provider, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_REFETCH_FLOOR_SECONDS", 0.0)
    api = await start_server(jwt_enabled=True, jwt_jwks_url=provider.url)
    refused = await status(api, token_of(provider))
    assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
    ready = await api.call("GET", "/readyz")
    assert ready.status == 503
    assert provider.url in str(ready.body)
    assert (await api.call("GET", "/livez")).status == 200
    assert (await api.call("GET", "/api/v1/status")).status == 401, "who has no token has none"
    await provider.start()
    assert (await status(api, token_of(provider))).status == 200, "asked again for the sake of a token"
    assert (await api.call("GET", "/readyz")).status == 200


async def test_keys_are_changed_while_the_server_runs(
    provider: Provider, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await provider.start()
    api = await start_server(jwt_enabled=True, jwt_jwks_url=provider.url, jwt_jwks_refresh_seconds=1)
    old = token_of(provider)
    assert (await status(api, old)).status == 200
    provider.keys["two"] = key_for("RS256")
    asked = provider.asked
    monkeypatch.setattr(keys, "_REFETCH_FLOOR_SECONDS", 0.0)
    answers = await asyncio.gather(*(status(api, token_of(provider, "two", "RS256", n=n)) for n in range(8)))
    assert {answer.status for answer in answers} == {200}
    assert provider.asked <= asked + 3, "those who come together are served by one request"
    assert (await status(api, old)).status == 200
    monkeypatch.setattr(keys, "_REFETCH_FLOOR_SECONDS", 3600.0)
    new = token_of(provider, "two", "RS256")
    del provider.keys["one"]

    async def withdrawn() -> bool:
        return (await status(api, old)).status == 401

    await until(withdrawn)
    assert (await status(api, new)).status == 200
    # Away again: the keys of before are still good, and no others.
    await provider.stop()
    assert (await status(api, new)).status == 200
    stranger = sign(CLAIMS, key_for("RS256"), "RS256", kid="two")
    assert (await status(api, stranger)).body["error"] == "Invalid token signature"
    unknown = sign(CLAIMS, key_for("RS256"), "RS256", kid="three")
    assert (await status(api, unknown)).body["error"] == "Token is signed with an unknown key"
    assert (await api.call("GET", "/readyz")).status == 200


async def test_strangers_do_not_make_the_server_ask_the_provider_again_and_again(
    provider: Provider, start_server: StartServer
) -> None:
    await provider.start()
    api = await start_server(jwt_enabled=True, jwt_jwks_url=provider.url)
    assert (await status(api, token_of(provider))).status == 200
    asked, stranger = provider.asked, key_for("ES256")
    for number in range(50):
        refused = await status(api, sign(CLAIMS, stranger, "ES256", kid=f"invented {number}"))
        assert refused.status == 401
    assert provider.asked <= asked + 1


async def test_people_may_log_in_beside_a_provider_whose_claims_look_like_those_of_a_session(
    provider: Provider, start_server: StartServer
) -> None:
    await provider.start()
    api = await start_server(
        jwt_enabled=True, queen_login=True, jwt_secret="a secret of thirty-two bytes or more", jwt_jwks_url=provider.url
    )
    token = token_of(provider, id=7, username="me")
    # The first may be the one for which the keys are fetched.
    assert [(await status(api, token)).status for _ in range(3)] == [200] * 3


async def test_tokens_that_confuse_keys_are_refused(provider: Provider, start_server: StartServer) -> None:
    provider.keys["rsa"] = key_for("RS256")
    provider.keys["ed"] = key_for("EdDSA")
    await provider.start()
    api = await start_server(jwt_enabled=True, jwt_jwks_url=provider.url)
    assert (await status(api, token_of(provider, "rsa", "RS256"))).status == 200
    assert (await status(api, token_of(provider, "ed", "EdDSA"))).status == 200
    # HS256 with the public key, which everybody has, for the secret.
    for text in (public_pem(provider.keys["rsa"]), public_pem(provider.keys["rsa"]).strip()):
        body = forge({"alg": "HS256", "kid": "rsa"}, CLAIMS).rpartition(".")[0]
        mac = base64.urlsafe_b64encode(hmac.new(text.encode(), body.encode(), sha256).digest()).rstrip(b"=")
        assert (await status(api, f"{body}.{mac.decode()}")).body["error"].startswith("Token uses HS256, expected")
    # The id of a key of another type than the algorithm needs.
    for token in (
        sign(CLAIMS, provider.keys["rsa"], "RS256", kid="one"),
        sign(CLAIMS, provider.keys["one"], "ES256", kid="rsa"),
        sign(CLAIMS, provider.keys["ed"], "EdDSA", kid="one"),
    ):
        assert (await status(api, token)).status == 401
    good = token_of(provider)
    for token in (
        good.rpartition(".")[0],
        good.rpartition(".")[0] + ".",
        forge({"alg": "none"}, CLAIMS),
        forge({"alg": "ES256", "kid": "one"}, CLAIMS, b"\0" * 64),
        good + "A" * 20_000,
        good.replace(".", "." + "A" * 20_000, 1),
    ):
        assert (await status(api, token)).status == 401, token[:80]
