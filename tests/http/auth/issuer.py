"""Tokens as an identity provider would issue them, good and bad."""

from __future__ import annotations

import base64
import time
from typing import Any

import msgspec
from joserfc import jwt
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey

SECRET = "a-secret-of-at-least-thirty-two-bytes!"


def issue(role: str | None = "admin", *, secret: str = SECRET, lifetime: float = 86_400, **claims: Any) -> str:
    """A token signed with HS256; a claim of None is left out."""
    body = {"sub": "tester", "role": role, "exp": int(time.time() + lifetime)} | claims
    return sign({key: value for key, value in body.items() if value is not None}, OctKey.import_key(secret), "HS256")


def sign(claims: dict[str, Any], key: Key, algorithm: str, **header: Any) -> str:
    return jwt.encode({"alg": algorithm} | header, claims, key, algorithms=[algorithm])


def forge(header: dict[str, Any], claims: dict[str, Any], signature: bytes = b"") -> str:
    """A token with whatever header and signature."""
    return ".".join(
        base64.urlsafe_b64encode(part).rstrip(b"=").decode()
        for part in (msgspec.json.encode(header), msgspec.json.encode(claims), signature)
    )


def key_for(algorithm: str) -> Key:
    if algorithm.startswith("HS"):
        return OctKey.import_key(SECRET)
    if algorithm.startswith("RS"):
        return RSAKey.generate_key(2048)
    return ECKey.generate_key("P-256") if algorithm == "ES256" else OKPKey.generate_key("Ed25519")


def public_pem(key: Key) -> str:
    assert not isinstance(key, OctKey)
    return key.as_pem(private=False).decode()


def jwks(**keys: Key) -> str:
    """A key set, by key id."""
    return msgspec.json.encode(
        {"keys": [{**key.as_dict(private=False), "kid": kid, "use": "sig"} for kid, key in keys.items()]}
    ).decode()
