"""Types of setting values: parsing, formatting, and the description of valid values."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A type of value: how it is parsed and formatted.

    `parse` raises ValueError for a text that does not match `expected`.
    """

    name: str
    expected: str
    parse: Callable[[str], object]
    format: Callable[[Any], str] = str
    empty_is_unset: bool = True


def whole(low: int, high: int) -> Kind:
    """An integer in a range, inclusive."""

    def parse(text: str) -> int:
        # int() would also accept "1_000" and digits of other scripts.
        if not (text.isascii() and text.removeprefix("-").isdigit()):
            raise ValueError
        number = int(text)
        if not low <= number <= high:
            raise ValueError
        return number

    return Kind("integer", f"an integer from {low} to {high}", parse)


def one_of(literal: Any) -> Kind:
    """One of the texts of a `Literal`; an empty one may be among them."""
    options = get_args(literal)

    def parse(text: str) -> str:
        if text not in options:
            raise ValueError
        return text

    values = ", ".join(option or "(empty)" for option in options)
    return Kind(values, f"one of {values}", parse)


def _parse_flag(text: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False, "": False}
    if text not in known:
        raise ValueError
    return known[text]


def _parse_database_urls(text: str) -> tuple[str, ...]:
    # A URL may contain several hosts separated by commas: split only before the next URL.
    urls = tuple(url.strip() for url in re.split(r",(?=\s*postgres(?:ql)?://)", text))
    if not all(url.startswith(("postgresql://", "postgres://")) for url in urls):
        raise ValueError
    return urls


def _parse_keys(text: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in text.split(","))
    # Also check the length of the text: fromhex() ignores spaces.
    if any(len(key) != 64 or len(bytes.fromhex(key)) != 32 for key in keys):
        raise ValueError
    return keys


def _parse_origins(text: str) -> tuple[str, ...]:
    origins = tuple(origin.strip().lower().removesuffix("/") for origin in text.split(","))
    if not all(origin == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin) for origin in origins):
        raise ValueError
    return origins


def _parse_peers(text: str) -> tuple[str, ...]:
    peers = tuple(peer.strip() for peer in text.split(","))
    for peer in peers:
        split_host_port(peer)
    return peers


def split_host_port(text: str) -> tuple[str, int | None]:
    """`host`, `host:port`, `[ipv6]:port` or a bare IPv6 address; ValueError for anything else."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError
        port = rest[1:]
    elif text.count(":") > 1:
        host, rest, port = text, "", ""
    else:
        host, rest, port = text.partition(":")
    if not host or any(character.isspace() or character in "/@" for character in host):
        raise ValueError
    if not rest:
        return host, None
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError
    return host, int(port)


def _parse_urls(text: str) -> tuple[str, ...]:
    urls = tuple(url.strip().rstrip("/") for url in text.split(","))
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError
    return urls


def _parse_url(text: str) -> str:
    parts = urlsplit(text.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment:
        raise ValueError
    return text.strip()


def _parse_words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise ValueError
    return words


def _parse_host_names(text: str) -> tuple[str, ...]:
    names = _parse_words(text)
    # With a port, or with a pattern, it would be the name of no request.
    if not all(name == "*" or re.fullmatch(r"[^\s/:*\[\]]+|\[[0-9A-Fa-f:.]+\]", name) for name in names):
        raise ValueError
    return names


def _parse_roles(text: str) -> tuple[tuple[str, str], ...]:
    roles: dict[str, str] = {}
    for pair in text.split(","):
        name, colon, role = pair.strip().rpartition(":")
        if not (colon and name) or role not in ("admin", "read-write", "read-only"):
            raise ValueError
        roles[name] = role
    return tuple(roles.items())


def _parse_sqs_keys(text: str) -> tuple[tuple[str, str, str, tuple[str, ...]], ...]:
    keys: dict[str, tuple[str, str, str, tuple[str, ...]]] = {}
    for entry in text.split(","):
        id, secret, role, *queues = entry.strip().split(":")
        patterns = tuple(queues[0].split(";")) if queues else ()
        if not (id and secret) or role not in ("admin", "read-write", "read-only") or len(queues) > 1:
            raise ValueError
        if id in keys or not all(patterns):
            raise ValueError
        keys[id] = (id, secret, role, patterns)
    return tuple(keys.values())


def _format_sqs_key(key: tuple[str, str, str, tuple[str, ...]]) -> str:
    *words, patterns = key
    return ":".join((*words, ";".join(patterns)) if patterns else words)


def _parse_quotas(text: str) -> tuple[tuple[str, int], ...]:
    quotas: dict[str, int] = {}
    for pair in text.split(","):
        namespace, colon, number = pair.strip().rpartition(":")
        if not (colon and namespace and number.isascii() and number.isdigit()) or int(number) > 2**31 - 1:
            raise ValueError
        quotas[namespace] = int(number)
    return tuple(quotas.items())


def _parse_modes(text: str) -> tuple[tuple[str, str], ...]:
    modes: dict[str, str] = {}
    for pair in text.split(","):
        namespace, colon, mode = pair.strip().rpartition(":")
        if not (colon and namespace) or mode not in ("sync", "buffered"):
            raise ValueError
        modes[namespace] = mode
    return tuple(modes.items())


def _parse_seconds(text: str) -> int:
    found = re.fullmatch(r"(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s?)?", text, re.ASCII)
    if not text or found is None:
        raise ValueError
    hours, minutes, seconds = (int(number or 0) for number in found.groups())
    return hours * 3600 + minutes * 60 + seconds


def _parse_path(text: str) -> Path:
    return Path(text).expanduser().absolute()


TEXT = Kind("text", "text", str)
FLAG = Kind(
    "true, false",
    "true, 1, false, 0 or empty",
    _parse_flag,
    format=lambda value: "true" if value else "false",
    empty_is_unset=False,
)
PATH = Kind("path", "a path", _parse_path)
DATABASE_URLS = Kind(
    "URLs, comma-separated",
    "postgresql:// URLs, separated by commas",
    _parse_database_urls,
    format=",".join,
)
KEYS = Kind(
    "keys, comma-separated",
    "keys of 64 hexadecimal digits, separated by commas",
    _parse_keys,
    format=",".join,
)
ORIGINS = Kind(
    "origins, comma-separated",
    "origins such as https://app.example.com, separated by commas, or *",
    _parse_origins,
    format=",".join,
)
PEERS = Kind(
    "hosts, comma-separated",
    "hosts as name, name:port, [ipv6]:port, separated by commas",
    _parse_peers,
    format=",".join,
)
URLS = Kind(
    "URLs, comma-separated",
    "http:// or https:// URLs, separated by commas",
    _parse_urls,
    format=",".join,
)
URL = Kind("URL", "a URL that begins with http:// or https://", _parse_url)
WORDS = Kind("words, by comma", "words separated by commas", _parse_words, format=",".join)
HOST_NAMES = Kind(
    "host names, comma-separated",
    "host names such as queen.example.com or [::1], without scheme and port, separated by commas, or *",
    _parse_host_names,
    format=",".join,
)
ROLES = Kind(
    "name:role, by comma",
    "names, each with admin, read-write or read-only, such as billing:read-write",
    _parse_roles,
    format=lambda roles: ",".join(f"{name}:{role}" for name, role in roles),
)
SQS_KEYS = Kind(
    "keys, comma-separated",
    "keys as id:secret:role or id:secret:role:queues, the role admin, read-write or read-only, and queues such as "
    "mail-*;orders",
    _parse_sqs_keys,
    format=lambda keys: ",".join(map(_format_sqs_key, keys)),
)
QUOTAS = Kind(
    "namespace:number, comma-separated",
    "namespaces with a number of items per minute, such as default:10000,payments:5000",
    _parse_quotas,
    format=lambda quotas: ",".join(f"{namespace}:{number}" for namespace, number in quotas),
)
MODES = Kind(
    "namespace:mode, comma-separated",
    "namespaces with sync or buffered, such as payments:buffered",
    _parse_modes,
    format=lambda modes: ",".join(f"{namespace}:{mode}" for namespace, mode in modes),
)
SECONDS = Kind("duration", "a number of seconds, or hours, minutes and seconds such as 24h or 1h30m", _parse_seconds)
# 2^31 - 1 is the maximum of PostgreSQL's timeouts.
DURATION_MS = whole(0, 2**31 - 1)
INTERVAL_MS = whole(1, 2**31 - 1)
