"""The session of a command: the options of all commands, the server, and the output."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import typer

from queen.cli.common.contexts import Contexts, config_path, resolve_token
from queen.cli.common.exits import AuthFailed, ServerFailed, UserError
from queen.cli.common.output import Output

if TYPE_CHECKING:
    import ssl

    from queen.client.sync import AdminSync, QueenSync

DEFAULT_SERVER: Final = "http://localhost:6632"
OPTIONS_KEY: Final = "queen.options"
_TIMEOUT_MILLIS: Final = 30_000


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go, and with which token."""

    url: str
    token: str | None
    insecure: bool
    context: str | None
    configured: bool


class Session:
    """One run of one command."""

    def __init__(self, given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> None:
        self._given = given
        self._environ = os.environ if environ is None else environ
        self._client: QueenSync | None = None
        color = False if given.get("no_color") else True if given.get("color") else None
        self.out = Output(
            given.get("output"),
            headers=not given.get("no_headers"),
            quiet=bool(given.get("quiet")),
            color=color,
        )

    @classmethod
    def of(cls, ctx: typer.Context) -> Session:
        """The session of the command that runs; one for each run, closed with it."""
        root = ctx.find_root()
        if not isinstance(root.obj, cls):
            root.obj = cls(ctx.meta.get(OPTIONS_KEY, {}))
            root.call_on_close(root.obj.close)
        session: Session = root.obj
        return session

    @cached_property
    def contexts(self) -> Contexts:
        """The file of contexts."""
        return Contexts(config_path(self._given.get("config"), self._environ))

    @property
    def context_is_named(self) -> bool:
        """Whether the context was asked for, and is not just the current one."""
        return bool(self._given.get("context") or self._environ.get("QUEEN_CONTEXT"))

    @cached_property
    def server(self) -> Server:
        """The server to use: that of the options, else of the environment, else of the context, else a local one."""
        name = self._given.get("context") or self._environ.get("QUEEN_CONTEXT") or self.contexts.current
        entry = self.contexts.get(name) if name else {}
        url = self._given.get("server") or self._environ.get("QUEEN_SERVER") or entry.get("server")
        configured = bool(url)
        url = check_server(str(url or DEFAULT_SERVER))
        of_context = str(entry.get("server") or url).rstrip("/")
        if url != of_context and not self.context_is_named:
            # A token is for the server that it was made for; another one would learn it.
            entry = {}
        token = self._given.get("token") or self._environ.get("QUEEN_TOKEN")
        token = (token or resolve_token(entry.get("token-ref"), self._environ) or "").strip()
        if not token.isprintable():
            raise AuthFailed("the token holds control characters; log in again (queen login) or pass another: --token")
        return Server(
            url=url,
            token=token or None,
            insecure=bool(self._given.get("insecure") or entry.get("insecure")),
            context=name,
            configured=configured,
        )

    def connect(self, timeout_millis: int = _TIMEOUT_MILLIS, attempts: int = 2) -> QueenSync:
        """A client of the server."""
        from queen.client.sync import QueenSync

        server = self.server
        return QueenSync(
            server.url,
            bearer_token=server.token,
            insecure=server.insecure,
            timeout_millis=timeout_millis,
            retry_attempts=attempts,
            retry_delay_millis=200,
            strict=True,
            handle_signals=False,
        )

    @property
    def queen(self) -> QueenSync:
        """The client of this session."""
        if self._client is None:
            self._client = self.connect()
        return self._client

    @property
    def admin(self) -> AdminSync:
        return self.queen.admin

    def tls_context(self) -> ssl.SSLContext:
        """For requests that the client does not make."""
        import ssl

        context = ssl.create_default_context()
        if self.server.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def pages(self, fetch: Any, key: str, limit: int | None, size: int = 500) -> Iterator[dict[str, Any]]:
        """Every entry of a listing that comes in pages, up to a limit; `fetch` takes `limit` and `offset`."""
        offset = 0
        while limit is None or offset < limit:
            wanted = size if limit is None else min(size, limit - offset)
            answer = fetch(limit=wanted, offset=offset)
            entries = answer[key] if isinstance(answer, Mapping) else answer or []
            yield from entries
            offset += len(entries)
            if len(entries) < wanted:
                return

    def confirm(self, yes: bool, what: str) -> None:
        """Go on only with `--yes`, or when the person at the terminal says so."""
        if yes:
            return
        if not (self.out.terminal and os.isatty(0)):
            raise UserError(f"{what} cannot be undone; pass --yes to do it")
        if not typer.confirm(f"{what} cannot be undone. Continue?", err=True):
            raise UserError("nothing was changed")

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                client.close()


def check_server(url: str) -> str:
    """The URL of a server, without a slash at its end. Raises `UserError` for what is none."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"the server {url!r} must begin with http:// or https://")
    try:
        parts = urlsplit(url)
        # A port out of range is found out when it is asked for.
        complete = bool(parts.hostname) and parts.port != 0
    except ValueError:
        complete = False
    if not complete or any(character.isspace() for character in url):
        raise UserError(f"the server {url!r} is not a URL; try {DEFAULT_SERVER}")
    return url.rstrip("/")


def check_answer(answer: Any) -> Any:
    """The answer, unless it says in a body with `error` or `success: false` that it failed."""
    if isinstance(answer, Mapping) and (answer.get("error") or answer.get("success") is False):
        raise ServerFailed(str(answer.get("error") or answer.get("message") or "the server refused"))
    return answer
