"""Exit codes, and the errors that end a command with one of them and one line on stderr."""

from __future__ import annotations

import sys
from typing import Final

from queen.errors import QueenError

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
    """The server cannot be reached, or did not do what it was asked."""

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
"""What to do about a thing that the server does not have, by a word of its message."""


def _where_to_look(text: str) -> str:
    found = (step for word, step in _LISTS.items() if word in text.lower())
    return next(found, "queen queue list and queen topic list show what there is")


def report(error: Exception) -> int:
    """Print an error that its user can act on as one line, and return the exit code; others are raised."""
    if isinstance(error, NothingFound):
        return error.code
    if isinstance(error, QueenError):
        return fail(*explain(error))
    # A network or a PostgreSQL that fails in the middle of something is no bug of ours.
    if not isinstance(error, OSError) and not type(error).__module__.startswith("asyncpg"):
        raise error
    text = " ".join(str(error).split()) or type(error).__name__
    return fail(SERVER, f"{text}; try again, run queen doctor to find the cause")


def fail(code: int, text: str) -> int:
    print(f"queen: {text}", file=sys.stderr)
    return code


def explain(error: BaseException, server: str | None = None) -> tuple[int, str]:
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

    text = " ".join(str(error).split())
    if isinstance(error, CommandFailed):
        return error.code, text
    if isinstance(error, AuthError):
        step = "log in (queen login) or pass --token" if error.status == 401 else "use a token with a higher role"
        return AUTH, f"{text}; {step}"
    if isinstance(error, QueenTimeoutError):
        return SERVER, f"{server or error.url}: {text}; run queen doctor to find the cause"
    if isinstance(error, QueenConnectionError):
        return SERVER, f"cannot reach {server or error.url}: {text}; start it (queen serve), or name another: --server"
    if isinstance(error, OverloadedError):
        return SERVER, f"{text}; try again in {error.retry_after or 1:.0f} s, run queen doctor to find the cause"
    if isinstance(error, NotFoundError):
        return SERVER, f"{text}; {_where_to_look(text)}"
    if isinstance(error, RequestError):
        return SERVER, text
    return USER, text
