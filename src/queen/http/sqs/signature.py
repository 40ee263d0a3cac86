"""AWS Signature Version 4: whether a request was signed with a key that the server knows."""

from __future__ import annotations

import calendar
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import quote

from queen.http.auth.principal import ROLES, Patterns, Principal
from queen.http.server.message import Request
from queen.http.sqs.errors import SqsError

_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_SERVICE: Final = "sqs"
_MOST_SKEW_SECONDS: Final = 15 * 60
_LONGEST_PRESIGNED_SECONDS: Final = 7 * 86_400
_UNRESERVED: Final = "-_.~"
_HEADER: Final = re.compile(r"\s*([A-Za-z]+)\s*=\s*([^,]*?)\s*(?:,|$)")


@dataclass(frozen=True, slots=True)
class AccessKey:
    """A key as QUEEN_SQS_KEYS has it; `queues` are patterns of names, none: all."""

    id: str
    secret: str
    role: str
    queues: tuple[str, ...] = ()

    @property
    def principal(self) -> Principal:
        return Principal(self.id, ROLES[self.role], Patterns(self.queues) if self.queues else None)


@dataclass(frozen=True, slots=True)
class _Signature:
    key_id: str
    date: str
    scope: str
    region: str
    signed: tuple[str, ...]
    signature: str
    at: str
    lasts: int
    """Seconds for which a presigned request is valid; 0: it is not presigned."""


class SignatureVerifier:
    """Knows the access keys."""

    def __init__(self, keys: Iterable[AccessKey], now: Callable[[], float] = time.time) -> None:
        self._keys = {key.id: key for key in keys}
        self._principals = {key.id: key.principal for key in self._keys.values()}
        self._now = now

    def verify(self, request: Request) -> Principal:
        """Who has signed a request. Raises `SqsError` as SQS does."""
        sent = _signature_of(request)
        key = self._keys.get(sent.key_id)
        if key is None:
            raise SqsError("InvalidClientTokenId", "The security token included in the request is invalid.")
        self._check_time(sent)
        if b"x-amz-target" in request.headers and "x-amz-target" not in sent.signed:
            # An attacker could replay the request with another action.
            raise SqsError("IncompleteSignature", "SignedHeaders has to name x-amz-target, which says the action")
        canonical = _canonical_request(request, sent)
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        text = f"{_ALGORITHM}\n{sent.at}\n{sent.scope}\n{digest}"
        made = hmac.new(_signing_key(key.secret, sent.date, sent.region), text.encode(), hashlib.sha256).hexdigest()
        if not hmac.compare_digest(made.encode(), sent.signature.encode()):
            raise SqsError(
                "SignatureDoesNotMatch",
                "The request signature we calculated does not match the signature you provided. Check your secret "
                "access key and signing method.",
            )
        return self._principals[sent.key_id]

    def _check_time(self, sent: _Signature) -> None:
        try:
            at = calendar.timegm(time.strptime(sent.at, "%Y%m%dT%H%M%SZ"))
        except ValueError:
            raise SqsError(
                "IncompleteSignature", "Date must be in ISO-8601 'basic format', as 20260131T120000Z"
            ) from None
        if not sent.at.startswith(sent.date):
            raise SqsError(
                "SignatureDoesNotMatch", "Date in Credential scope does not match YYYYMMDD from ISO-8601 date"
            )
        age = self._now() - at
        if age < -_MOST_SKEW_SECONDS or age > (sent.lasts or _MOST_SKEW_SECONDS):
            raise SqsError("SignatureDoesNotMatch", f"Signature expired: {sent.at} is too far from the server's clock")


def region_of(request: Request) -> str:
    """The region that a client signs for, whether its signature is checked or not; empty without a signature."""
    try:
        return _signature_of(request).region
    except SqsError:
        return ""


def _signature_of(request: Request) -> _Signature:
    header = request.headers.get(b"authorization", b"").decode("latin-1")
    if header.startswith(_ALGORITHM):
        fields = dict(_HEADER.findall(header[len(_ALGORITHM) :]))
        at = request.headers.get(b"x-amz-date", b"").decode("latin-1")
        return _parsed(fields, at, 0)
    query = request.query
    if query.get("X-Amz-Algorithm") == _ALGORITHM:
        fields = {name: query.get(f"X-Amz-{name}", "") for name in ("Credential", "SignedHeaders", "Signature")}
        lasts = query.get("X-Amz-Expires", "")
        seconds = int(lasts) if lasts.isascii() and lasts.isdigit() and len(lasts) < 8 else 0
        return _parsed(fields, query.get("X-Amz-Date", ""), min(seconds, _LONGEST_PRESIGNED_SECONDS))
    raise SqsError("MissingAuthenticationToken", "Request is missing Authentication Token")


def _parsed(fields: Mapping[str, str], at: str, lasts: int) -> _Signature:
    credential = fields.get("Credential", "").split("/")
    signed = tuple(name for name in fields.get("SignedHeaders", "").split(";") if name)
    signature = fields.get("Signature", "")
    if len(credential) != 5 or not signature or "host" not in signed or not at:
        raise SqsError(
            "IncompleteSignature",
            "Authorization requires Credential, SignedHeaders (with host) and Signature, and the request a X-Amz-Date",
        )
    key_id, date, region, service, end = credential
    if service != _SERVICE or end != "aws4_request":
        raise SqsError("SignatureDoesNotMatch", f"Credential should be scoped to correct service: '{_SERVICE}'.")
    return _Signature(key_id, date, "/".join(credential[1:]), region, signed, signature, at, lasts)


def _canonical_request(request: Request, sent: _Signature) -> str:
    headers = request.headers
    lines = []
    for name in sent.signed:
        value = headers.get(name.encode("latin-1", "replace"), b"").decode("latin-1")
        lines.append(f"{name}:{' '.join(value.split())}\n")
    query = "&".join(
        sorted(
            f"{quote(name, safe=_UNRESERVED)}={quote(value, safe=_UNRESERVED)}"
            for name, value in request.query.items()
            if name != "X-Amz-Signature"
        )
    )
    body = hashlib.sha256(request.body).hexdigest()
    path = quote(_normalized(request.path), safe="/~")
    return f"{request.method}\n{path}\n{query}\n{''.join(lines)}\n{';'.join(sent.signed)}\n{body}"


def _normalized(path: str) -> str:
    """The path without empty segments and dots; it is percent-encoded once more, as for every service but S3."""
    kept: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            del kept[-1:]
        elif segment not in ("", "."):
            kept.append(segment)
    ends = "/" if path.endswith("/") and kept else ""
    return f"/{'/'.join(kept)}{ends}"


@lru_cache(maxsize=1024)
def _signing_key(secret: str, date: str, region: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (date, region, _SERVICE, "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key
