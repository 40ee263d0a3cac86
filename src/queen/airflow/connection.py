"""Airflow connections of type `queen`: reading and checking them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from queen.errors import QueenError
from queen.suggestions import did_you_mean

DEFAULT_PORT: Final = 6632
_EXTRAS: Final = ("tls", "insecure", "timeout_seconds", "database_url", "executable")


class StoredConnection(Protocol):
    """As Airflow stores it."""

    conn_id: Any
    host: Any
    port: Any
    schema: Any
    password: Any

    @property
    def extra_dejson(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class ServerConnection:
    """A server, or several on one database."""

    urls: tuple[str, ...]
    token: str | None = field(default=None, repr=False)
    insecure: bool = False
    timeout_seconds: float | None = None
    database_url: str | None = field(default=None, repr=False)
    """PostgreSQL behind the server, which pipelines read directly."""
    executable: str | None = None
    """The command `queen` that runs pipelines."""

    def client_options(self) -> dict[str, Any]:
        """For `Queen` and `QueenSync`."""
        options: dict[str, Any] = {
            "urls": list(self.urls),
            "bearer_token": self.token,
            "insecure": self.insecure,
            "strict": True,
            "handle_signals": False,
        }
        if self.timeout_seconds is not None:
            options["timeout_millis"] = int(self.timeout_seconds * 1000)
        return options


def read_connection(stored: StoredConnection) -> ServerConnection:
    """Raises `QueenError`, which names the connection and what is wrong with it."""
    where = f"connection '{stored.conn_id}'"
    extra: Mapping[str, Any] = stored.extra_dejson or {}
    for name in extra:
        if name not in _EXTRAS:
            hint = did_you_mean(name, _EXTRAS, f"known are {', '.join(_EXTRAS)}")
            raise QueenError(f"{where}: unknown extra '{name}'; {hint}")
    hosts = [host.strip() for host in (stored.host or "").split(",") if host.strip()]
    if not hosts:
        raise QueenError(f"{where} has no host; expected a name such as queen.example.com, or a URL")
    tls = _flag(where, "tls", extra.get("tls"), stored.schema == "https")
    return ServerConnection(
        urls=tuple(_url(where, host, stored.port, tls) for host in hosts),
        token=stored.password or None,
        insecure=_flag(where, "insecure", extra.get("insecure"), False),
        timeout_seconds=_seconds(where, extra.get("timeout_seconds")),
        database_url=extra.get("database_url") or None,
        executable=extra.get("executable") or None,
    )


def _url(where: str, host: str, port: int | None, tls: bool) -> str:
    if "://" in host:
        if not host.startswith(("http://", "https://")):
            raise QueenError(f"{where}: host {host!r} must be a name, or a URL with http:// or https://")
        return host.rstrip("/")
    # An IPv6 address has colons of its own.
    bracketed = f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host
    has_port = urlsplit(f"//{bracketed}").port is not None
    return f"{'https' if tls else 'http'}://{bracketed}" + ("" if has_port else f":{port or DEFAULT_PORT}")


def _flag(where: str, name: str, value: object, default: bool) -> bool:
    """Connections given as a URL have text in place of true and false."""
    if value is None or value == "":
        return default
    text = str(value).strip().lower()
    if text not in ("true", "false", "1", "0"):
        raise QueenError(f"{where}: extra '{name}' must be true or false, not {value!r}")
    return text in ("true", "1")


def _seconds(where: str, value: Any) -> float | None:
    if value is None or value == "":
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not seconds > 0:
        raise QueenError(f"{where}: extra 'timeout_seconds' must be a number above 0, not {value!r}")
    return seconds
