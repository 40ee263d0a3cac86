"""Signing in with an OpenID provider: discovery, the authorization code flow with PKCE, and finding the user."""

from __future__ import annotations

import base64
import hashlib
import logging
import secrets
import time
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote_plus, urlencode

import aiohttp
import msgspec

from queen.errors import Conflict
from queen.http.auth.keys import Jwks, KeyRing
from queen.http.auth.principal import ClaimNames, KeyUnknown, TokenRefused
from queen.http.auth.tokens import TokenVerifier
from queen.proxy.settings import OpenIdProvider, is_email
from queen.proxy.users import User, UserStore, as_username

FLOW_SECONDS: Final = 300
_DISCOVERY_SECONDS: Final = 3600.0
_LONGEST_EMAIL: Final = 254
_TIMEOUT: Final = aiohttp.ClientTimeout(total=10)

log = logging.getLogger(__name__)


class SignInFailed(Exception):
    """A login failed: `code` is the error code for the login page."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class _Discovery(msgspec.Struct):
    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)


class _Tokens(msgspec.Struct):
    id_token: str


@dataclass(frozen=True, slots=True)
class Flow:
    """One attempt to sign in, kept by the browser meanwhile."""

    state: str
    nonce: str
    verifier: str

    @classmethod
    def begin(cls) -> Flow:
        return cls(*(secrets.token_urlsafe(32) for _ in range(3)))

    @property
    def challenge(self) -> str:
        return base64.urlsafe_b64encode(hashlib.sha256(self.verifier.encode()).digest()).rstrip(b"=").decode()


class OpenId:
    """One provider."""

    def __init__(self, provider: OpenIdProvider, users: UserStore, *, google: bool = False) -> None:
        self.provider = provider
        self._users = users
        self._google = google
        self._found: _Discovery | None = None
        self._found_at = 0.0
        self._verifier: TokenVerifier | None = None

    async def authorization_url(self, flow: Flow) -> str:
        """Where the browser is sent."""
        found = await self._discover()
        query = {
            "client_id": self.provider.client_id,
            "redirect_uri": self.provider.redirect_uri,
            "response_type": "code",
            "scope": "openid email profile",
            "state": flow.state,
            "nonce": flow.nonce,
            "code_challenge": flow.challenge,
            "code_challenge_method": "S256",
        }
        # Providers with several policies name the policy in the endpoint's own query.
        joint = "&" if "?" in found.authorization_endpoint else "?"
        return f"{found.authorization_endpoint}{joint}{urlencode(query)}"

    async def finish(self, flow: Flow, code: str) -> User:
        """The user that this authorization code stands for; raises `SignInFailed`."""
        claims = await self._verify(await self._exchange(flow, code))
        if claims.get("nonce") != flow.nonce:
            raise SignInFailed("invalid_state", "the nonce is another")
        self._check_allowed(claims)
        return await self._resolve(claims)

    async def _discover(self) -> _Discovery:
        if self._found is not None and time.monotonic() - self._found_at < _DISCOVERY_SECONDS:
            return self._found
        url = f"{self.provider.issuer}/.well-known/openid-configuration"
        try:
            async with aiohttp.ClientSession(timeout=_TIMEOUT) as session, session.get(url) as response:
                found = msgspec.json.decode(await response.read(), type=_Discovery)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            if self._found is not None:
                return self._found
            raise SignInFailed("google_failed", f"{url} could not be read: {error}") from error
        if found.issuer.rstrip("/") != self.provider.issuer.rstrip("/"):
            raise SignInFailed("google_failed", f"{url} describes another issuer, {found.issuer}")
        if self._found is None or found.jwks_uri != self._found.jwks_uri:
            issuers = [found.issuer]
            if self._google:
                issuers.append("accounts.google.com")
            ring = KeyRing(("RS256", "RS384", "RS512", "ES256", "EdDSA", "Ed25519"), (), Jwks(found.jwks_uri, 300))
            self._verifier = TokenVerifier(
                ring, ClaimNames(), issuers=issuers, audiences=[self.provider.client_id], skew=60
            )
        self._found, self._found_at = found, time.monotonic()
        return found

    async def _exchange(self, flow: Flow, code: str) -> str:
        found = await self._discover()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.provider.redirect_uri,
            "client_id": self.provider.client_id,
            "code_verifier": flow.verifier,
        }
        headers = {}
        if self.provider.client_secret:
            if "client_secret_post" in found.token_endpoint_auth_methods_supported:
                form["client_secret"] = self.provider.client_secret
            else:
                headers["Authorization"] = _basic(form.pop("client_id"), self.provider.client_secret)
        try:
            async with (
                aiohttp.ClientSession(timeout=_TIMEOUT) as session,
                session.post(found.token_endpoint, data=form, headers=headers) as response,
            ):
                body = await response.read()
                if response.status != 200:
                    raise SignInFailed("google_failed", f"the code was refused with {response.status}")
                return msgspec.json.decode(body, type=_Tokens).id_token
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            raise SignInFailed("google_failed", f"the code could not be exchanged: {error}") from error

    async def _verify(self, token: str) -> dict[str, Any]:
        verifier = self._verifier
        assert verifier is not None
        try:
            try:
                return dict(verifier.check(token.encode()).claims)
            except KeyUnknown as unknown:
                await verifier.keys.refetch_for(unknown.algorithm, unknown.kid)
                return dict(verifier.check(token.encode()).claims)
        except TokenRefused as refused:
            raise SignInFailed("google_failed", f"the id token was refused: {refused.text}") from refused

    def _check_allowed(self, claims: dict[str, Any]) -> None:
        email = claims.get("email")
        if not isinstance(email, str) or claims.get("email_verified") not in (True, "true"):
            raise SignInFailed("not_allowed", "the provider does not vouch for the email address")
        if len(email) > _LONGEST_EMAIL or not email.isprintable():
            raise SignInFailed("not_allowed", f"no user can have the email address {email[:_LONGEST_EMAIL]!r}")
        domains, emails = self.provider.allowed_domains, self.provider.allowed_emails
        domain = claims.get("hd") if isinstance(claims.get("hd"), str) else email.rpartition("@")[2]
        if domains and str(domain).lower() not in domains and email.rpartition("@")[2].lower() not in domains:
            raise SignInFailed("not_allowed", f"the domain {domain} is not allowed")
        if emails and not any(is_email(pattern, email) for pattern in emails):
            raise SignInFailed("not_allowed", f"{email} is not on the list")

    async def _resolve(self, claims: dict[str, Any]) -> User:
        subject, email = str(claims.get("sub", "")), str(claims["email"])
        if not subject:
            raise SignInFailed("google_failed", "the id token names no subject")
        identity = f"{self.provider.issuer} {subject}"
        users = self._users
        user = await (users.by_google(subject) if self._google else users.by_identity(identity))
        if user is None:
            user = await users.by_email(email)
            if user is not None:
                linked = await (
                    users.link_google(user, subject) if self._google else users.link_identity(user, identity)
                )
                if not linked:
                    # Addresses are given to other people in time; what a person may do must not be.
                    raise SignInFailed(
                        "not_allowed", f"the user {user.username} signs in with another account that had {email!r}"
                    )
            elif self.provider.auto_provision:
                user = await self._provision(email, subject, identity)
            else:
                raise SignInFailed("not_provisioned", f"there is no user with the email {email}")
        if user.disabled:
            raise SignInFailed("not_allowed", f"the user {user.username} is disabled")
        return user

    async def _provision(self, email: str, subject: str, identity: str) -> User:
        """Create a user at the first sign-in."""
        users = self._users
        try:
            return await users.create(
                as_username(email),
                None,
                self.provider.default_role,
                email,
                google=subject if self._google else None,
                identity=None if self._google else identity,
            )
        except Conflict as conflict:
            # Another browser of the same person may have been first; any other user of the name keeps it.
            user = await (users.by_google(subject) if self._google else users.by_identity(identity))
            if user is None:
                raise SignInFailed("not_allowed", str(conflict)) from conflict
            return user


def _basic(client_id: str, secret: str) -> str:
    """Client authentication by header, where secrets are not accepted in forms (RFC 6749, 2.3.1)."""
    pair = f"{quote_plus(client_id)}:{quote_plus(secret)}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"
