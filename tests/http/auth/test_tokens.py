"""Which tokens are accepted, and why the others are not."""

from __future__ import annotations

import asyncio
import base64
import hmac
import time
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from joserfc.jwk import Key, OctKey, RSAKey

from queen.errors import SettingsError
from queen.http.auth.keys import Jwks, KeyRing
from queen.http.auth.principal import ClaimNames, KeyUnknown, Patterns, TokenRefused
from queen.http.auth.tokens import LONGEST_TOKEN, TokenVerifier
from queen.http.server.message import Access
from queen.settings import Settings
from tests.http.auth.issuer import SECRET, forge, issue, jwks, key_for, public_pem, sign

ASYMMETRIC = ["RS256", "RS384", "RS512", "ES256", "EdDSA"]


def verifier(**settings: Any) -> TokenVerifier:
    values = {"jwt_enabled": True, "jwt_secret": SECRET} | settings
    return TokenVerifier.from_settings(Settings.from_env({}, **values))


def refusal(checker: TokenVerifier, token: str) -> str:
    with pytest.raises(TokenRefused) as refused:
        checker.verify(token.encode())
    return refused.value.text


@pytest.mark.parametrize("algorithm", ["HS256", "HS384", "HS512", *ASYMMETRIC])
def test_a_token_of_every_algorithm_is_accepted(algorithm: str) -> None:
    key = key_for(algorithm)
    settings = {} if algorithm.startswith("HS") else {"jwt_secret": None, "jwt_public_key": public_pem(key)}
    token = sign({"sub": "me", "role": "read-write"}, key, algorithm)
    principal = verifier(**settings).verify(token.encode())
    assert (principal.subject, principal.access) == ("me", Access.READ_WRITE)
    stranger = OctKey.import_key("x" * 40) if algorithm.startswith("HS") else key_for(algorithm)
    forged = sign({"sub": "me", "role": "admin"}, stranger, algorithm)
    assert refusal(verifier(**settings), forged) == "Invalid token signature"


@pytest.mark.parametrize(
    ("claims", "text"),
    [
        ({"exp": 1}, "Token has expired"),
        ({"exp": "soon"}, "Invalid token: the claim exp is not a time"),
        ({"exp": True}, "Invalid token: the claim exp is not a time"),
        ({"exp": float("1e300")}, "Invalid token: the claim exp is not a time"),
        ({"nbf": 2**40}, "Token is not valid yet"),
        ({"iat": 2**40}, "Token was issued in the future"),
        ({"sub": 7}, "Invalid token: the claim sub is not text of up to 1024 printable characters"),
        ({"sub": "a\x00b"}, "Invalid token: the claim sub is not text of up to 1024 printable characters"),
        ({"queues": 7}, "Invalid token: the claim queues is not a list of patterns"),
        ({"namespaces": [7]}, "Invalid token: the claim namespaces is not a list of patterns"),
        ({"scopes": {"a": "b"}}, "Invalid token: the claim scopes is not a list of texts"),
    ],
)
def test_claims_that_make_no_sense_refuse_the_token(claims: dict[str, Any], text: str) -> None:
    assert refusal(verifier(), issue(**claims)) == text


def test_clocks_may_differ_by_the_skew() -> None:
    now = int(time.time())
    lenient = verifier(jwt_clock_skew=60)
    lenient.verify(issue(exp=now - 30, nbf=now + 30, iat=now + 30).encode())
    strict = verifier(jwt_clock_skew=0)
    assert refusal(strict, issue(exp=now - 1)) == "Token has expired"
    assert refusal(strict, issue(nbf=now + 30)) == "Token is not valid yet"


def test_issuer_and_audience_are_checked_when_they_are_set() -> None:
    checker = verifier(jwt_issuer="https://a,https://b", jwt_audience="queen,other")
    checker.verify(issue(iss="https://b", aud="queen").encode())
    checker.verify(issue(iss="https://a", aud=["x", "other"]).encode())
    for issuer in (None, "https://c", ["https://a"]):
        assert refusal(checker, issue(iss=issuer, aud="queen")) == "Invalid token issuer"
    for audience in (None, "x", ["x"], [["queen"]], 7):
        assert refusal(checker, issue(iss="https://a", aud=audience)) == "Invalid token audience"


def test_a_token_without_a_signature_is_refused() -> None:
    claims = {"sub": "me", "role": "admin"}
    for name in ("none", "None", "NONE", "nOnE", ""):
        assert refusal(verifier(), forge({"alg": name}, claims)).startswith(f"Token uses {name}, expected HS256")
    for header in ({}, {"alg": None}, {"alg": 5}, {"alg": ["HS256"]}):
        assert "expected HS256" in refusal(verifier(), forge(header, claims))
    good = issue()
    stripped = good.rpartition(".")[0]
    assert refusal(verifier(), stripped + ".") == "Invalid token signature"
    assert refusal(verifier(), stripped) == "Invalid token: expected three parts separated by dots"


def test_a_public_key_is_never_used_as_a_secret() -> None:
    """The classic confusion: HS256 over the text of the public key, which everybody has."""
    key = key_for("RS256")
    pem = public_pem(key)
    checker = verifier(jwt_secret=None, jwt_public_key=pem)
    body = forge({"alg": "HS256", "typ": "JWT"}, {"role": "admin"}).rpartition(".")[0]
    mac = hmac.new(pem.encode(), body.encode(), sha256).digest()
    token = f"{body}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"
    assert refusal(checker, token) == "Token uses HS256, expected RS256 or RS384 or RS512"
    # With a secret besides, the algorithm is admitted; the public key still is no secret.
    both = verifier(jwt_public_key=pem)
    assert refusal(both, token) == "Invalid token signature"


@pytest.mark.parametrize(
    ("token", "text"),
    [
        ("", "three parts"),
        ("a.b", "three parts"),
        ("a.b.c.d.e", "three parts"),
        ("....", "three parts"),
        ("!.b.c", "its header is not a JSON object"),
        (forge({"alg": "HS256"}, {}).replace(".", ".é", 1), "Invalid token signature"),
        ("W10.e30.c2ln", "its header is not a JSON object"),
        ("x" * (LONGEST_TOKEN + 1), f"longer than {LONGEST_TOKEN} bytes"),
    ],
)
def test_what_is_no_token_is_refused(token: str, text: str) -> None:
    assert text in refusal(verifier(), token)


def test_headers_that_name_keys_of_their_own_are_not_believed() -> None:
    mine = key_for("RS256")
    assert isinstance(mine, RSAKey)
    checker = verifier(jwt_secret=None, jwt_public_key=public_pem(key_for("RS256")))
    for header in ({"jwk": mine.as_dict(private=False)}, {"jku": "https://evil/keys"}, {"kid": "../../etc/passwd"}):
        assert refusal(checker, sign({"role": "admin"}, mine, "RS256", **header)) == "Invalid token signature"
    assert refusal(checker, forge({"alg": "RS256", "crit": ["x"], "x": 1}, {}, b"s")) == "Invalid token signature"


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_refuse(junk: bytes) -> None:
    checker = verifier()
    good = issue().encode()
    for token in (junk, good[:20] + junk + good[20:] if junk else b"", junk + b"." + good):
        with pytest.raises(TokenRefused):
            checker.verify(token)


@given(st.data())
def test_a_changed_token_is_refused(data: st.DataObject) -> None:
    good = issue()
    at = data.draw(st.integers(0, len(good) - 2))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyzABCXYZ0189-_"))
    changed = good[:at] + letter + good[at + 1 :]
    if changed != good:
        with pytest.raises(TokenRefused):
            verifier().verify(changed.encode())


def test_an_accepted_token_is_refused_once_it_has_expired() -> None:
    now = [1000.0]
    checker = TokenVerifier(KeyRing.of("auto", SECRET, "", ""), ClaimNames(), skew=0, clock=lambda: now[0])
    token = issue(exp=1100).encode()
    checker.verify(token)
    now[0] = 1099.9
    checker.verify(token)
    now[0] = 1100.0
    with pytest.raises(TokenRefused, match="expired"):
        checker.verify(token)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"jwt_secret": None}, "there is no key to verify tokens with: set JWT_SECRET, JWT_PUBLIC_KEY or JWT_JWKS_URL"),
        ({"jwt_secret": None, "jwt_algorithm": "HS256"}, "set JWT_SECRET"),
        ({"jwt_secret": "  \n"}, "JWT_SECRET is blank"),
        ({"jwt_algorithm": "RS256"}, "the only key that is set is of type oct"),
        ({"jwt_secret": None, "jwt_public_key": "not a key"}, "expected a public key in PEM"),
        ({"jwt_secret": "-----BEGIN PUBLIC KEY-----\nabc"}, "a public key belongs in JWT_PUBLIC_KEY"),
        ({"jwt_algorithm": "HS256", "jwt_public_key": public_pem(key_for("ES256"))}, "has no use for it"),
        ({"jwt_algorithm": "none"}, "jwt_algorithm=none: expected one of auto, HS256"),
        ({"jwt_role_read_only": "admin"}, "JWT_ROLE_READ_WRITE and JWT_ROLE_READ_ONLY have to differ"),
        ({"jwt_role_admin": "staff", "jwt_role_read_write": "staff"}, "have to differ: they are 'staff', 'staff'"),
        ({"jwt_jwks_url": "file:///etc/passwd"}, "a URL that begins with http:// or https://"),
    ],
)
def test_a_server_without_a_usable_key_does_not_start(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        verifier(**settings)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("bits", "private", "text"), [(2048, True, "holds a private key"), (1024, False, "1024 bits is too weak")]
)
def test_a_server_with_a_private_or_a_weak_public_key_does_not_start(bits: int, private: bool, text: str) -> None:
    pem = RSAKey.generate_key(bits).as_pem(private=private).decode()
    with pytest.raises(SettingsError) as refused:
        verifier(jwt_secret=None, jwt_public_key=pem)
    assert text in str(refused.value)


class Provider:
    """An identity provider whose key set a test can change, and that may be down."""

    def __init__(self, **keys: Key) -> None:
        self.keys = keys
        self.down = False
        self.asked = 0
        self.now = 0.0

    async def fetch(self, url: str) -> str:
        self.asked += 1
        await asyncio.sleep(0)
        if self.down:
            raise OSError("connection refused")
        return jwks(**self.keys)

    def jwks(self) -> Jwks:
        return Jwks("https://idp/keys", 300, self.fetch, lambda: self.now)


def ring_of(provider: Provider) -> KeyRing:
    return KeyRing(("RS256", "ES256", "EdDSA"), (), provider.jwks())


async def test_an_unknown_key_is_fetched_but_not_again_and_again() -> None:
    old, new = key_for("ES256"), key_for("RS256")
    provider = Provider(old=old)
    ring = ring_of(provider)
    checker = TokenVerifier(ring, ClaimNames())
    assert ring.jwks is not None
    await ring.jwks.refresh()
    checker.verify(sign({"role": "admin"}, old, "ES256", kid="old").encode())
    provider.keys = {"old": old, "new": new}
    token = sign({"role": "admin"}, new, "RS256", kid="new").encode()
    with pytest.raises(KeyUnknown):
        checker.verify(token)
    assert not await ring.refetch_for("RS256", "new"), "it has just been asked"
    provider.now = 11
    assert await ring.refetch_for("RS256", "new")
    checker.verify(token)
    provider.now = 12
    for number in range(100):
        assert not await ring.refetch_for("RS256", f"invented {number}")
    assert provider.asked == 2


async def test_callers_at_the_same_time_share_one_request() -> None:
    provider = Provider(one=key_for("ES256"))
    ring = ring_of(provider)
    assert await asyncio.gather(*(ring.refetch_for("ES256", "one") for _ in range(20)))
    assert provider.asked == 1


async def test_a_withdrawn_key_is_refused_although_its_tokens_were_remembered() -> None:
    first, second = key_for("ES256"), key_for("ES256")
    provider = Provider(first=first)
    ring = ring_of(provider)
    checker = TokenVerifier(ring, ClaimNames())
    assert ring.jwks is not None
    await ring.jwks.refresh()
    token = sign({"role": "admin"}, first, "ES256", kid="first").encode()
    checker.verify(token)
    provider.keys = {"second": second}
    await ring.jwks.refresh()
    with pytest.raises(TokenRefused):
        checker.verify(token)


async def test_keys_stay_in_force_while_the_provider_answers_nonsense() -> None:
    key = key_for("EdDSA")
    answers = [jwks(one=key).encode(), b"", b"<html>", b"\xff", b"[]", b'{"keys":[{"a":' + b"[" * 100_000]
    coming = iter(answers)

    async def fetch(url: str) -> bytes:
        return next(coming)

    fetched = Jwks("https://idp/keys", 300, fetch)
    ring = KeyRing(("EdDSA",), (), fetched)
    for _ in answers:
        await fetched.refresh()
    assert ring.problem == ""
    TokenVerifier(ring, ClaimNames()).verify(sign({"role": "admin"}, key, "EdDSA", kid="one").encode())


async def test_keys_stay_in_force_while_the_provider_is_down() -> None:
    key = key_for("EdDSA")
    provider = Provider(one=key)
    ring = ring_of(provider)
    checker = TokenVerifier(ring, ClaimNames())
    assert ring.jwks is not None
    assert "no keys have been fetched" in ring.problem
    provider.down = True
    await ring.jwks.refresh()
    assert "connection refused" in ring.problem
    provider.down = False
    await ring.jwks.refresh()
    assert ring.problem == ""
    provider.down = True
    await ring.jwks.refresh()
    assert ring.problem == ""
    checker.verify(sign({"role": "admin"}, key, "EdDSA", kid="one").encode())
    checker.verify(sign({"role": "admin"}, key, "EdDSA").encode())


@pytest.mark.parametrize(
    ("claims", "access"),
    [
        ({"role": "admin"}, Access.ADMIN),
        ({"role": "read-write"}, Access.READ_WRITE),
        ({"role": "read-only"}, Access.READ_ONLY),
        ({"role": "read-only", "roles": ["x", "read-write"]}, Access.READ_WRITE),
        ({"role": ["admin"]}, Access.ADMIN),
        ({"roles": "admin"}, Access.ADMIN),
        ({"role": "Admin"}, Access.PUBLIC),
        ({"role": "administrator"}, Access.PUBLIC),
        ({"role": None}, Access.PUBLIC),
        ({"roles": [["admin"], {"admin": 1}, 7]}, Access.PUBLIC),
        ({}, Access.PUBLIC),
    ],
)
def test_roles_come_from_either_claim(claims: dict[str, Any], access: Access) -> None:
    assert ClaimNames().principal(claims).access is access


def test_roles_and_claims_can_have_other_names() -> None:
    names = ClaimNames.from_settings(
        Settings.from_env({}, jwt_roles_claim="groups", jwt_role_admin="ops", jwt_groups_claim="consumer_groups")
    )
    principal = names.principal({"groups": ["ops", "people"], "consumer_groups": ["a"]})
    assert principal.access is Access.ADMIN
    assert principal.groups is not None
    assert principal.groups.texts == ("a",)


@pytest.mark.parametrize(
    ("patterns", "admitted", "refused"),
    [
        (["orders"], ["orders"], ["orders2", "Orders", "order", ""]),
        (["orders.*"], ["orders.", "orders.eu"], ["orders", "xorders.eu"]),
        (["*"], ["", "anything", "a\nb"], []),
        (["a*c*e"], ["ace", "abcde", "acce"], ["ae", "aec", "abcd"]),
        (["**x**"], ["x", "axb"], ["y"]),
        (["*.eu", "b"], ["a.eu", "b"], ["a.us", "beu"]),
        (["a*a"], ["aa", "aba"], ["a"]),
        ([], [], ["", "a"]),
        (["a?c", "a.c", "[ab]"], ["a?c", "[ab]"], ["abc", "a"]),
    ],
)
def test_patterns(patterns: list[str], admitted: list[str], refused: list[str]) -> None:
    checker = Patterns(patterns)
    assert [name for name in (*admitted, *refused) if checker.admits(name)] == admitted


def test_scopes_of_mqueue() -> None:
    principal = ClaimNames().principal(
        {"scopes": ["pay:write", "pay:read", "log:read", "mail:*", "x:delete", "openid"]}
    )
    read, write = Access.READ_ONLY, Access.READ_WRITE
    assert [principal.may_use_topics("pay", access) for access in (read, write, Access.ADMIN)] == [True, True, False]
    assert [principal.may_use_topics("log", access) for access in (read, write)] == [True, False]
    assert [principal.may_use_topics("mail", access) for access in (read, write)] == [True, True]
    assert not principal.may_use_topics("x", read)
    writer = ClaimNames().principal({"scopes": "pay:write"})
    assert [writer.may_use_topics("pay", access) for access in (read, write)] == [False, True]
    everywhere = ClaimNames().principal({"allowed_namespaces": "*"})
    assert everywhere.may_use_topics("any", write)
    some = ClaimNames().principal({"allowed_namespaces": ["a"]})
    assert some.may_use_topics("a", write)
    assert not some.may_use_topics("b", read)
    # A role does not widen scopes, unless it is that of an administrator.
    narrowed = ClaimNames().principal({"role": "read-write", "scopes": ["pay:read"]})
    assert not narrowed.may_use_topics("pay", write)
    assert ClaimNames().principal({"role": "admin", "scopes": []}).may_use_topics("pay", write)
