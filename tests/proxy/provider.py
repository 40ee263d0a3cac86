"""An OpenID provider in a few lines: discovery, a login that needs no password, codes with PKCE, and signed tokens."""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
from typing import Any
from urllib.parse import unquote_plus, urlencode

from aiohttp import BasicAuth, web
from joserfc import jwt
from joserfc.jwk import RSAKey


class Provider:
    """Signs in the user that `claims` describes, without asking."""

    def __init__(self) -> None:
        self.claims: dict[str, Any] = {"sub": "42", "email": "eva@example.com", "email_verified": True}
        self.issuer = ""
        self.client_id = "queen"
        self.client_secret = "provider secret"
        self.basic = False
        """Secrets are taken in the header alone, as is usual where discovery says nothing about it."""
        self.policy = ""
        """In the query of where people sign in, and wanted there."""
        self.nonce: str | None = None
        """In place of the one that was asked for."""
        self._key = RSAKey.generate_key(2048, parameters={"kid": "one"})
        self._codes: dict[str, dict[str, str]] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/.well-known/openid-configuration", self._discovery)
        app.router.add_get("/authorize", self._authorize)
        app.router.add_post("/token", self._token)
        app.router.add_get("/keys", self._keys)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.issuer = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def sign(self, claims: dict[str, Any]) -> str:
        return jwt.encode({"alg": "RS256", "kid": "one"}, claims, self._key)

    async def _discovery(self, request: web.Request) -> web.Response:
        policy = f"?{urlencode({'p': self.policy})}" if self.policy else ""
        found: dict[str, Any] = {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize{policy}",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
        }
        if not self.basic:
            found["token_endpoint_auth_methods_supported"] = ["client_secret_basic", "client_secret_post"]
        return web.json_response(found)

    async def _authorize(self, request: web.Request) -> web.Response:
        query = request.query
        assert query.get("p", "") == self.policy
        assert query["response_type"] == "code"
        assert query["code_challenge_method"] == "S256"
        code = secrets.token_urlsafe(16)
        self._codes[code] = dict(query)
        back = urlencode({"code": code, "state": query["state"]})
        raise web.HTTPFound(f"{query['redirect_uri']}?{back}")

    async def _token(self, request: web.Request) -> web.Response:
        form = await request.post()
        client, secret = str(form.get("client_id")), form.get("client_secret")
        if self.basic:
            assert secret is None
            shown = BasicAuth.decode(request.headers["Authorization"])
            client, secret = unquote_plus(shown.login), unquote_plus(shown.password)
        asked = self._codes.pop(str(form["code"]), None)
        digest = hashlib.sha256(str(form["code_verifier"]).encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if (
            asked is None
            or asked["code_challenge"] != challenge
            or asked["redirect_uri"] != form["redirect_uri"]
            or (client, secret) != (self.client_id, self.client_secret)
        ):
            return web.json_response({"error": "invalid_grant"}, status=400)
        now = int(time.time())
        claims = {
            "iss": self.issuer,
            "aud": self.client_id,
            "iat": now,
            "exp": now + 60,
            "nonce": self.nonce or asked["nonce"],
        } | self.claims
        return web.json_response({"id_token": self.sign(claims), "access_token": "unused", "token_type": "Bearer"})

    async def _keys(self, request: web.Request) -> web.Response:
        return web.json_response({"keys": [{**self._key.as_dict(private=False), "kid": "one", "use": "sig"}]})
