"""Exit codes, and the errors that end a command with one of them and one line on stderr."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import urlsplit

from queen.cli.common.printable import printable
from queen.errors import DatabaseUnavailable, QueenError

OK: Final = 0
USER: Final = 1
SERVER: Final = 2
AUTH: Final = 3
EMPTY: Final = 4


class CommandFailed(QueenError):
    """A command ends with `code`; the text says what was wrong and what to do next."""

    code = USER


class UserError(CommandFailed):
    """An argument, a file or the configuration is wrong."""


class ServerFailed(CommandFailed):
    """The server cannot be reached, or the request failed."""

    code = SERVER


class AuthFailed(CommandFailed):
    """The token is missing, wrong, or not allowed to do this."""

    code = AUTH


class NothingFound(CommandFailed):
    """It worked, and there is nothing; no text is printed."""

    code = EMPTY


_LISTS: Final = {
    "lease": "it has ended or was acknowledged, pop again for a new one",
    "message": "queen messages list --queue QUEUE shows what there is",
    "partition": "queen partition list QUEUE shows what there is",
    "consumer group": "queen group list shows what there is",
    "topic": "queen topic list NAMESPACE shows what there is",
    "quer": "queen stream list shows what there is",
    "queue": "queen queue list shows what there is",
}
"""Advice for resources that do not exist, by a word of the error message."""


def _where_to_look(text: str) -> str:
    found = (step for word, step in _LISTS.items() if word in text.lower())
    return next(found, "queen queue list and queen topic list show what there is")


def report(error: Exception) -> int:
    """Print an error that its user can act on, and return the exit code; others are raised."""
    if isinstance(error, NothingFound):
        return error.code
    if isinstance(error, QueenError):
        return fail(*explain(error))
    if isinstance(error, UnicodeEncodeError):
        # Bytes of an argument that are not UTF-8, which the server would refuse, too.
        return fail(USER, f"{error.object[:80]!r} is not UTF-8; correct the argument, or the encoding of the terminal")
    # A failure of the network or of PostgreSQL is not a bug of the command.
    if not isinstance(error, OSError) and not type(error).__module__.startswith("asyncpg"):
        raise error
    if isinstance(error, OSError) and error.filename is not None:
        return fail(USER, f"{os.fsdecode(error.filename)}: {error.strerror}; check the path, and who may write there")
    text = " ".join(re.sub(r"^\[Errno -?\d+\]", "", str(error)).split()) or type(error).__name__
    return fail(SERVER, f"{text}; try again, run queen doctor to find the cause")


@contextlib.contextmanager
def telling_progress(done: Callable[[], int], what: str) -> Iterator[None]:
    """An error in here also says how much was done before, which is not undone."""
    try:
        yield
    except QueenError as error:
        if not done():
            raise
        code, text = explain(error)
        failure = CommandFailed(f"{text}; {done()} {what} before that")
        failure.code = code
        raise failure from error


def fail(code: int, text: str) -> int:
    print(f"queen: {printable(text)}", file=sys.stderr)
    return code


def explain(error: BaseException) -> tuple[int, str]:
    """The exit code of an error, and its message."""
    # The client is imported by then, or the error is not one of its own.
    from queen.client.errors import (
        AuthError,
        NotFoundError,
        OverloadedError,
        QueenConnectionError,
        QueenTimeoutError,
        RequestError,
    )

    # A list of problems has a line for each; all else is one line.
    listed = hasattr(error, "problems")
    text = str(error) if listed else " ".join(str(error).split())
    if isinstance(error, CommandFailed):
        return error.code, text
    if isinstance(error, AuthError):
        if error.detail:
            return AUTH, f"{text}: {error.detail}; use a token that may"
        step = "log in (queen login) or pass --token" if error.status == 401 else "use a token with a higher role"
        return AUTH, f"{text}; {step}"
    if isinstance(error, QueenTimeoutError):
        return SERVER, f"{_origin(error.url)}: {text}; run queen doctor to find the cause"
    if isinstance(error, QueenConnectionError):
        why, step = connection_failure(error)
        return SERVER, f"cannot reach {_origin(error.url)}: {why}; {step}"
    if isinstance(error, OverloadedError):
        return SERVER, f"{text}; try again in {error.retry_after or 1:.0f} s, run queen doctor to find the cause"
    if isinstance(error, RequestError) and (text == "Not Found" or text.startswith("HTTP ")):
        # Not the error of a Queen server.
        return SERVER, f"{error.method} {error.url}: {text}; is it a Queen server? --server names another"
    if isinstance(error, NotFoundError):
        return SERVER, f"{text}; {_where_to_look(text)}"
    if isinstance(error, RequestError):
        return SERVER, text
    if isinstance(error, DatabaseUnavailable):
        return USER, f"{text}; check that it runs, and the URL, PG_HOST or DATABASE_URLS"
    return USER, text


def connection_failure(error: BaseException) -> tuple[str, str]:
    """Why a server could not be reached by the client or by urllib, as the system says it, and what to do."""
    cause = getattr(error.__cause__, "os_error", None) or getattr(error, "reason", None) or error.__cause__
    if "CERTIFICATE_VERIFY_FAILED" in str(cause):
        why = getattr(getattr(cause, "certificate_error", cause), "verify_message", "") or str(cause)
        step = "have this host trust its issuer (SSL_CERT_FILE), or pass --insecure"
        return f"its certificate is not trusted ({why})", step
    if "WRONG_VERSION_NUMBER" in str(cause):
        return "it does not speak TLS", "use http:// in place of https://"
    why = " ".join(str(error).split()).removeprefix("connection failed: ")
    if isinstance(cause, OSError) and cause.errno is not None:
        # Numbers below zero are errors of the resolver, which are not in errno.
        why = (os.strerror(cause.errno) if cause.errno > 0 else cause.strerror or why).lower()
    return why, "start it (queen serve), or name another: --server"


def _origin(url: str) -> str:
    """The server of a request."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
