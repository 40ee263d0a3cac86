"""The variables of the proxy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

import pytest
from joserfc.jwk import ECKey, OKPKey

from queen.errors import SettingsError
from queen.proxy.sessions import Sessions
from queen.proxy.settings import OpenIdProvider, ProxySettings
from queen.proxy.users import UserStore
from queen.settings import Settings

REQUIRED = {"JWT_SECRET": "secret", "PG_HOST": "db"}
GOOGLE = {"GOOGLE_CLIENT_ID": "id", "GOOGLE_CLIENT_SECRET": "s", "GOOGLE_REDIRECT_URI": "https://q"}


def test_little_is_required() -> None:
    settings = ProxySettings.from_env(REQUIRED)
    assert (settings.listen_host, settings.port, settings.session_seconds) == ("0.0.0.0", 3000, 86_400)
    assert not settings.forwards
    assert settings.database_url.startswith("postgresql://")
    assert "secret" not in repr(settings)


def test_every_variable_is_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from a file\n")
    settings = ProxySettings.from_env(
        {
            "PORT": "8080",
            "HOST": "127.0.0.1",
            "QUEEN_SERVER_URL": "http://queen:6632/",
            "PG_HOST": "db",
            "PG_PORT": "6543",
            "PG_DB": "people",
            "PG_USER": "me",
            "PG_PASSWORD": "pass",
            "PG_USE_SSL": "true",
            "JWT_SECRET_FILE": str(tmp_path / "secret"),
            "JWT_EXPIRES_IN": "7d",
            "NODE_ENV": "production",
            "COOKIE_DOMAIN": ".example.com",
            "TRUSTED_PROXIES": "2",
            "EXTERNAL_JWKS_URL": "https://idp/keys",
            "EXTERNAL_ISSUER": "https://idp",
            "EXTERNAL_AUDIENCE": "queen,other",
            "GOOGLE_CLIENT_ID": "id",
            "GOOGLE_CLIENT_SECRET": "hidden",
            "GOOGLE_REDIRECT_URI": "https://q/api/auth/google/callback",
            "GOOGLE_ALLOWED_DOMAINS": "Example.com",
            "GOOGLE_ALLOWED_EMAILS": "eva@example.com,/@partner\\.example$/",
            "GOOGLE_AUTO_PROVISION": "true",
            "GOOGLE_DEFAULT_ROLE": "read-write",
            "OIDC_ISSUER": "https://sso.example.com",
            "OIDC_NAME": "Example",
            "OIDC_CLIENT_ID": "queen",
            "OIDC_REDIRECT_URI": "https://q/api/auth/oidc/callback",
            "FORWARD_AUTH_ENABLED": "true",
            "FORWARD_AUTH_EMIT_HEADERS": "Authorization,X-Auth-User",
            "FORWARD_AUTH_ALWAYS_MINT": "true",
            "FORWARD_AUTH_ALLOWED_REDIRECT_HOSTS": "app.example.com",
            "AUTH_HOST": "auth.example.com",
            "INTERNAL_JWT_SIGNING_KEY": "another",
            "INTERNAL_JWT_ISSUER": "here",
            "INTERNAL_JWT_AUDIENCE": "there",
            "INTERNAL_JWT_EXPIRES_IN": "5m",
            "INTERNAL_JWT_CLAIMS": "sub:email,role:role",
        }
    )
    read = dataclasses.asdict(settings)
    assert "me:pass@db:6543/people" in read.pop("database_url")
    google = OpenIdProvider(
        "Google",
        "https://accounts.google.com",
        "id",
        "hidden",
        "https://q/api/auth/google/callback",
        ("example.com",),
        ("eva@example.com", "/@partner\\.example$/"),
        True,
        "read-write",
    )
    oidc = OpenIdProvider("Example", "https://sso.example.com", "queen", "", "https://q/api/auth/oidc/callback")
    expected = {
        "port": 8080,
        "host": "127.0.0.1",
        "queen_server_url": "http://queen:6632",
        "jwt_secret": "from a file",
        "session_seconds": 7 * 86_400,
        "secure_cookies": True,
        "cookie_domain": ".example.com",
        "trusted_proxies": 2,
        "external_jwks_url": "https://idp/keys",
        "external_issuer": ("https://idp",),
        "external_audience": ("queen", "other"),
        "google": dataclasses.asdict(google),
        "oidc": dataclasses.asdict(oidc),
        "forward_auth": True,
        "forward_auth_headers": ("Authorization", "X-Auth-User"),
        "forward_auth_always_mint": True,
        "forward_auth_redirect_hosts": ("app.example.com",),
        "auth_host": "auth.example.com",
        "internal_secret": "another",
        "internal_issuer": "here",
        "internal_audience": "there",
        "internal_seconds": 300,
        "internal_claims": (("sub", "email"), ("role", "role")),
    }
    assert {key: read[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"JWT_SECRET": ""}, "JWT_SECRET is not set: the proxy signs sessions with it"),
        ({"JWT_EXPIRES_IN": "soon"}, "JWT_EXPIRES_IN=soon: expected a time such as 15m"),
        ({"PORT": "high"}, "PORT=high: expected a whole number"),
        ({"QUEEN_SERVER_URL": "queen:6632"}, "QUEEN_SERVER_URL=queen:6632: expected a URL"),
        ({"FORWARD_AUTH_ENABLED": "yes"}, "FORWARD_AUTH_ENABLED=yes: expected true, 1, false, 0 or nothing"),
        ({"GOOGLE_CLIENT_ID": "id"}, "GOOGLE_CLIENT_ID, _REDIRECT_URI and _CLIENT_SECRET belong together"),
        (
            {"OIDC_CLIENT_ID": "id", "OIDC_REDIRECT_URI": "https://q"},
            "OIDC_CLIENT_ID, _REDIRECT_URI and _ISSUER belong together",
        ),
        (
            GOOGLE | {"GOOGLE_DEFAULT_ROLE": "king"},
            "GOOGLE_DEFAULT_ROLE=king: expected one of admin, read-write, read-only",
        ),
        ({"INTERNAL_JWT_CLAIMS": "sub"}, "INTERNAL_JWT_CLAIMS=sub: expected pairs"),
        ({"JWT_SECRET": "", "JWT_SECRET_FILE": "/nowhere"}, "JWT_SECRET_FILE=/nowhere: expected a readable file"),
        # Nobody in a list is not the same as no list.
        (GOOGLE | {"GOOGLE_ALLOWED_DOMAINS": ","}, "GOOGLE_ALLOWED_DOMAINS=,: expected words separated by commas"),
        (GOOGLE | {"GOOGLE_ALLOWED_EMAILS": " , "}, "GOOGLE_ALLOWED_EMAILS=,: expected words separated by commas"),
        (GOOGLE | {"GOOGLE_ALLOWED_EMAILS": "/[/"}, "GOOGLE_ALLOWED_EMAILS=/[/: expected a regular expression"),
        ({"EXTERNAL_AUDIENCE": ","}, "EXTERNAL_AUDIENCE=,: expected words separated by commas"),
        ({"INTERNAL_JWT_EXPIRES_IN": "never"}, "INTERNAL_JWT_EXPIRES_IN=never: expected a time such as 15m"),
    ],
)
def test_what_cannot_be_is_refused(variables: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        ProxySettings.from_env(REQUIRED | variables)
    assert said in str(refused.value)


def test_keys_of_the_provider_are_found_under_the_name_that_the_server_has_for_them() -> None:
    assert ProxySettings.from_env(REQUIRED | {"JWT_JWKS_URL": "https://idp/a"}).external_jwks_url == "https://idp/a"
    both = {"JWT_JWKS_URL": "https://idp/a", "EXTERNAL_JWKS_URL": "https://idp/b"}
    assert ProxySettings.from_env(REQUIRED | both).external_jwks_url == "https://idp/b"


def test_the_secret_is_the_same_as_the_server_reads() -> None:
    secret = " a secret with blanks around it "
    assert ProxySettings.from_env(REQUIRED | {"JWT_SECRET": secret}).jwt_secret == secret
    assert Settings.from_env({"JWT_SECRET": secret}).jwt_secret == secret


@pytest.mark.parametrize(
    ("pem", "said"),
    [
        ("nonsense", "expected an RSA, EC (P-256 or P-384) or Ed25519 private key"),
        (OKPKey.generate_key("Ed25519").as_pem(private=False).decode(), "private key in PEM"),
        (OKPKey.generate_key("X25519").as_pem(private=True).decode(), "private key in PEM"),
        (ECKey.generate_key("P-521").as_pem(private=True).decode(), "private key in PEM"),
    ],
)
def test_keys_that_cannot_sign_refuse_the_start(pem: str, said: str) -> None:
    settings = ProxySettings.from_env(REQUIRED | {"INTERNAL_JWT_PRIVATE_KEY_PEM": pem})
    with pytest.raises(SettingsError) as refused:
        Sessions(settings, cast(UserStore, None))
    assert said in str(refused.value)


def test_a_secret_that_is_a_key_of_another_kind_refuses_the_start() -> None:
    pem = OKPKey.generate_key("Ed25519").as_pem(private=False).decode()
    with pytest.raises(SettingsError, match="JWT_SECRET holds a PEM key"):
        Sessions(ProxySettings.from_env(REQUIRED | {"JWT_SECRET": pem}), cast(UserStore, None))
