"""`queen token`: tokens for programs, and what is in one."""

import os
import time
from typing import Annotated, Any

import msgspec
import typer
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

from queen.cli.common.tree import command, group
from queen.errors import QueenError
from queen.http.auth.keys import read_secret
from queen.http.auth.principal import ROLES, ClaimError, ClaimNames, TokenRefused
from queen.http.auth.tokens import TokenVerifier, read_claims
from queen.proxy.settings import parse_duration
from queen.settings import Settings, look_up

app = group("Tokens for programs: create and inspect them.")

Names = Annotated[
    list[str] | None, typer.Option(show_default=False, help="A pattern such as 'orders.*'; may be repeated.")
]


@command(app, "create", example="queen token create billing --queue 'invoices.*' --group 'billing*' --expires 30d")
def create(
    subject: Annotated[str, typer.Argument(help="Who it is for: stamped on every message as producerSub.")],
    role: Annotated[str, typer.Option(help="admin, read-write or read-only.")] = "read-write",
    expires: Annotated[str, typer.Option(help="How long it is valid, such as 24h, 30d or never.")] = "24h",
    queue: Names = None,
    namespace: Names = None,
    group: Names = None,
    scope: Annotated[
        list[str] | None, typer.Option(show_default=False, help="For topics alone, such as payments:write.")
    ] = None,
) -> None:
    """Make a token, signed with JWT_SECRET or with the key in JWT_PRIVATE_KEY (PEM)."""
    settings = Settings.from_env(os.environ)
    if role not in ROLES:
        raise QueenError(f"role must be one of {', '.join(ROLES)}, not {role!r}")
    now, lifetime = int(time.time()), parse_duration(expires, "--expires")
    names = {
        "admin": settings.jwt_role_admin,
        "read-write": settings.jwt_role_read_write,
        "read-only": settings.jwt_role_read_only,
    }
    claims: dict[str, Any] = {"sub": subject, settings.jwt_roles_claim: names[role], "iat": now}
    if lifetime is not None:
        claims["exp"] = now + lifetime
    if settings.jwt_issuer:
        claims["iss"] = settings.jwt_issuer[0]
    if settings.jwt_audience:
        claims["aud"] = settings.jwt_audience[0]
    for claim, patterns in (
        (settings.jwt_queues_claim, queue),
        (settings.jwt_namespaces_claim, namespace),
        (settings.jwt_groups_claim, group),
        ("scopes", scope),
    ):
        if patterns:
            claims[claim] = patterns
    try:
        ClaimNames.from_settings(settings).principal(claims)
    except ClaimError as error:
        # A server would refuse every request that carries it.
        raise QueenError(f"the token would not be valid: {error}") from error
    key, algorithm = _signing_key(settings)
    print(jwt.encode({"alg": algorithm}, claims, key, algorithms=[algorithm]))


@command(app, "show", example="queen token show $TOKEN")
def show(token: Annotated[str, typer.Argument(help="The token.", envvar="QUEEN_TOKEN")]) -> None:
    """Print the claims of a token, and whether a server with these settings would accept it."""
    try:
        header, claims = read_claims(token.encode())
    except TokenRefused as refused:
        raise QueenError(refused.text) from refused
    print(msgspec.json.format(msgspec.json.encode({"header": header, "claims": claims})).decode())
    settings = Settings.from_env(os.environ)
    if not (settings.jwt_secret or settings.jwt_public_key):
        print("not verified: neither JWT_SECRET nor JWT_PUBLIC_KEY is set")
        return
    try:
        principal = TokenVerifier.from_settings(settings).verify(token.encode())
    except TokenRefused as refused:
        raise QueenError(f"it is not valid: {refused.text}") from refused
    print(f"valid: {principal.subject or 'without a subject'}, {principal.access.name.lower().replace('_', '-')}")


def _signing_key(settings: Settings) -> tuple[RSAKey | ECKey | OKPKey | OctKey, str]:
    pem = (look_up(os.environ, "JWT_PRIVATE_KEY") or "").replace("\\n", "\n")
    if pem:
        for kind, algorithm in ((RSAKey, "RS256"), (ECKey, "ES256"), (OKPKey, "EdDSA")):
            try:
                return kind.import_key(pem), algorithm
            except (JoseError, ValueError, TypeError):
                continue
        raise QueenError("JWT_PRIVATE_KEY: expected an RSA, P-256 or Ed25519 private key in PEM")
    if not settings.jwt_secret:
        raise QueenError("JWT_SECRET is not set: it is what tokens are signed with (or JWT_PRIVATE_KEY, a key in PEM)")
    return read_secret(settings.jwt_secret), "HS256" if settings.jwt_algorithm in (
        "auto",
        "HS256",
    ) else settings.jwt_algorithm
