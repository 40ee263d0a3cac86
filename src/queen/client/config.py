"""Configuration of a client, its defaults, and its log."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final

import msgspec

from queen.wire.times import iso_millis

CLIENT_DEFAULTS: Final[dict[str, Any]] = {
    "timeout_millis": 30_000,
    "retry_attempts": 3,
    "retry_delay_millis": 1_000,
    "load_balancing_strategy": "affinity",
    "affinity_hash_ring": 128,
    "enable_failover": True,
    "health_retry_after_millis": 5_000,
    "bearer_token": None,
    "headers": {},
    "strict": False,
    "handle_signals": True,
    "insecure": False,
}

QUEUE_DEFAULTS: Final[dict[str, Any]] = {
    "lease_time": 300,
    "retry_limit": 3,
    "priority": 0,
    "delayed_processing": 0,
    "window_buffer": 0,
    "max_size": 0,
    "retention_seconds": 0,
    "completed_retention_seconds": 0,
    "encryption_enabled": False,
}

CONSUME_DEFAULTS: Final[dict[str, Any]] = {
    "concurrency": 1,
    "batch": 1,
    "auto_ack": True,
    "wait": True,
    "timeout_millis": 30_000,
    "limit": None,
    "idle_millis": None,
    "renew_lease": False,
    "renew_lease_interval_millis": None,
    "subscription_mode": None,
    "subscription_from": None,
}

POP_DEFAULTS: Final[dict[str, Any]] = {
    "batch": 1,
    "wait": True,
    "timeout_millis": 30_000,
    "auto_ack": False,
}

BUFFER_DEFAULTS: Final[dict[str, Any]] = {
    "message_count": 100,
    "time_millis": 1_000,
    "max_messages": 10_000,
    "max_bytes": 64 * 1024 * 1024,
}


VARIABLE = "QUEEN_CLIENT_LOG"

_logger = logging.getLogger("queen.client")


class ClientLog:
    """Logs to `logging`, or prints with QUEEN_CLIENT_LOG=true. On hot paths check `enabled` before calling."""

    __slots__ = ("enabled",)

    def __init__(self) -> None:
        self.enabled = os.environ.get(VARIABLE, "").lower() == "true"

    def info(self, where: str, **details: Any) -> None:
        if self.enabled:
            print(_line("INFO", where, details), file=sys.stdout)

    def warning(self, where: str, text: str, **details: Any) -> None:
        """Log a problem that the client recovers from."""
        if self.enabled:
            print(_line("WARN", where, {"message": text, **details}), file=sys.stderr)
        else:
            _logger.warning("%s: %s%s", where, text, f" {details}" if details else "")


def _line(level: str, where: str, details: dict[str, Any]) -> str:
    text = msgspec.json.encode(details, enc_hook=str).decode()
    return f"[{iso_millis(datetime.now(UTC))}] [{level}] [{where}] {text}"


class Strategy(Enum):
    """Load balancing strategy over several servers."""

    AFFINITY = "affinity"
    """Consistent hashing of queue, partition and group: consumers of a group use the same server."""
    ROUND_ROBIN = "round-robin"
    """The next server for each request."""
    SESSION = "session"
    """One server per client and consumer."""


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """The validated options of `Queen(...)`."""

    urls: tuple[str, ...]
    timeout_millis: int
    retry_attempts: int
    retry_delay_millis: int
    load_balancing_strategy: Strategy
    affinity_hash_ring: int
    enable_failover: bool
    health_retry_after_millis: int
    bearer_token: str | None = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    strict: bool
    handle_signals: bool
    insecure: bool


def read_config(given: str | Sequence[str] | Mapping[str, Any] | None, named: Mapping[str, Any]) -> ClientConfig:
    """Merge a URL, a list of URLs or a dict of options with keyword options, which take precedence."""
    options: dict[str, Any] = dict(CLIENT_DEFAULTS)
    if isinstance(given, str):
        options["urls"] = [given]
    elif isinstance(given, Mapping):
        options.update(given)
    elif given is not None:
        options["urls"] = list(given)
    options.update({name: value for name, value in named.items() if value is not None})
    url = options.pop("url", None)
    urls = options.pop("urls", None) or ([url] if url else None)
    if not urls:
        raise ValueError("Queen needs a URL: Queen('http://localhost:6632'), urls=[...], or {'urls': [...]}")
    unknown = sorted(options.keys() - CLIENT_DEFAULTS.keys())
    if unknown:
        text = f"Queen has no option {', '.join(unknown)}: ignored. Options are {', '.join(CLIENT_DEFAULTS)}"
        warnings.warn(text, stacklevel=3)
    return ClientConfig(
        urls=tuple(_checked_url(one) for one in ([urls] if isinstance(urls, str) else urls)),
        timeout_millis=_at_least(options, "timeout_millis", 1),
        retry_attempts=_at_least(options, "retry_attempts", 1),
        retry_delay_millis=_at_least(options, "retry_delay_millis", 0),
        load_balancing_strategy=_strategy(options["load_balancing_strategy"]),
        affinity_hash_ring=_at_least(options, "affinity_hash_ring", 1),
        enable_failover=bool(options["enable_failover"]),
        health_retry_after_millis=_at_least(options, "health_retry_after_millis", 0),
        bearer_token=options["bearer_token"],
        headers=dict(options["headers"] or {}),
        strict=bool(options["strict"]),
        handle_signals=bool(options["handle_signals"]),
        insecure=bool(options["insecure"]),
    )


def _checked_url(url: object) -> str:
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ValueError(f"Invalid URL: {url!r} (must start with http:// or https://)")
    return url.rstrip("/")


def _at_least(options: Mapping[str, Any], name: str, least: int) -> int:
    value = options[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
        raise ValueError(f"{name} must be a number of at least {least}, not {value!r}")
    return int(value)


def _strategy(name: object) -> Strategy:
    try:
        return Strategy(name)
    except ValueError:
        known = ", ".join(one.value for one in Strategy)
        raise ValueError(f"load_balancing_strategy must be one of {known}, not {name!r}") from None
