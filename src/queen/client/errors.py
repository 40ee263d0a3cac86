"""The exceptions of the client. `str(error)` is the message; attributes hold the request.

QueenError
├── RequestError              a request failed; `.method`, `.url` and `.status` identify it
│   ├── QueenConnectionError  no server is reachable, or the connection was lost before the response
│   │   └── QueenTimeoutError the request timed out
│   ├── BadRequestError       400 and other 4xx: the request is invalid; nothing was stored
│   ├── AuthError             401, 403: the token is missing, invalid or lacks permission
│   ├── NotFoundError         404: the resource does not exist
│   ├── ConflictError         409: the request conflicts with the stored state
│   ├── LeaseLostError        the lease expired or was released; the message is redelivered
│   ├── OverloadedError       429, 503: retry after `.retry_after` seconds
│   ├── ServerError           any other 5xx
│   ├── PushError             the server rejected some of the items: `.items`
│   └── TransactionError      the transaction was rejected and not applied; `.results` of the operations tried
│       └── PreconditionError a change of a key did not apply: `.reason`, `.value` and `.version` of the key
├── DeadLetterError           raised by a handler: the message is a dead letter, and not retried
├── UnsentError               buffered messages could not be sent: `.messages`
├── LockLostError             a lock is not held, or not any more
└── ClientClosedError         the client was used after `close()`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from queen.errors import QueenError

__all__ = [
    "TRANSIENT",
    "AuthError",
    "BadRequestError",
    "ClientClosedError",
    "ConflictError",
    "DeadLetterError",
    "LeaseLostError",
    "LockLostError",
    "NotFoundError",
    "OverloadedError",
    "PushError",
    "QueenConnectionError",
    "QueenError",
    "QueenTimeoutError",
    "RequestError",
    "ServerError",
    "TransactionError",
    "UnsentError",
    "UnsentMessage",
]


class RequestError(QueenError):
    """A request failed. `detail` is what the server said besides the message: which limit a token exceeds."""

    detail: str = ""

    def __init__(self, what: str, method: str = "", url: str = "", status: int | None = None) -> None:
        super().__init__(what)
        self.method = method
        self.url = url
        self.status = status
        if url:
            # Programs compare the text, so it stays as the server sent it; tracebacks also show the request.
            self.add_note(f"{method} {url}" + (f" -> {status}" if status else ""))


class QueenConnectionError(RequestError):
    """No server is reachable, or the connection was lost; the request may or may not have been applied."""


class QueenTimeoutError(QueenConnectionError):
    """The request timed out; it may or may not have been applied."""


class BadRequestError(RequestError):
    """The request is invalid; nothing was stored."""


class AuthError(RequestError):
    """The token is missing or invalid (401), or lacks permission (403)."""


class NotFoundError(RequestError):
    """The resource does not exist."""


class ConflictError(RequestError):
    """The request conflicts with the stored state."""


class LeaseLostError(RequestError):
    """The lease expired or was released; the message is redelivered.

    For several items of topics, `ids` are those that have lost their lease.
    """

    ids: tuple[int, ...] = ()


class OverloadedError(RequestError):
    """The server is overloaded or unavailable; retry after `retry_after` seconds."""

    def __init__(self, what: str, method: str, url: str, status: int, retry_after: float | None = None) -> None:
        super().__init__(what, method, url, status)
        self.retry_after = retry_after


class ServerError(RequestError):
    """The server failed to process the request."""


TRANSIENT = (QueenConnectionError, OverloadedError, ServerError)
"""Errors that are worth a retry."""

_LONGEST_TEXT = 10_000


class DeadLetterError(QueenError):
    """To be raised by a handler: its message becomes a dead letter with this text, and is not retried."""


def text_of_error(error: BaseException) -> str:
    """What is sent to the server of an error that a handler has raised: as much as it takes, and only valid text."""
    try:
        text = str(error) if isinstance(error, DeadLetterError) else f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text[:_LONGEST_TEXT].encode(errors="backslashreplace").decode()


class PushError(RequestError):
    """The server rejected some of the items; `items` are those, each with its `error`."""

    def __init__(self, what: str, items: Sequence[dict[str, Any]]) -> None:
        super().__init__(what)
        self.items = list(items)


class TransactionError(RequestError):
    """The transaction was rejected and not applied; `results` are those of the operations tried."""

    def __init__(self, what: str, results: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(what)
        self.results = list(results)


class PreconditionError(TransactionError):
    """A change of a key did not apply, and the transaction with it: `reason`, and the `value` and `version` it has.

    The reason is `exists`, `absent`, `version`, `limit` or `type`.
    """

    def __init__(self, what: str, reason: str, value: Any = None, version: int | None = None) -> None:
        super().__init__(what)
        self.reason = reason
        self.value = value
        self.version = version


@dataclass(frozen=True, slots=True)
class UnsentMessage:
    """A buffered message that could not be sent, with the reason."""

    queue: str
    partition: str
    transaction_id: str
    data: Any
    error: str


class UnsentError(QueenError):
    """Buffered messages could not be sent; `messages` are those, in order, each with its error."""

    def __init__(self, messages: Sequence[UnsentMessage]) -> None:
        self.messages = list(messages)
        addresses = sorted({f"{message.queue}/{message.partition}" for message in self.messages})
        shown = ", ".join(addresses[:5]) + (", …" if len(addresses) > 5 else "")
        reason = self.messages[0].error if self.messages else ""
        super().__init__(
            f"{len(self.messages)} buffered messages were not sent (to {shown}): {reason}. "
            "They are in .messages of this error"
        )


class LockLostError(QueenError):
    """A lock is not held: another owner has it, or it expired before it was renewed."""


class ClientClosedError(QueenError):
    """The client was used after `close()`."""


class _ErrorBody(msgspec.Struct):
    error: Any = None
    detail: Any = None


_BY_STATUS: dict[int, type[RequestError]] = {
    401: AuthError,
    403: AuthError,
    404: NotFoundError,
    409: ConflictError,
}


def error_of_status(status: int, reason: str, body: bytes, retry_after: str, method: str, url: str) -> RequestError:
    """The exception for a response of status 300 and above."""
    said, detail = _texts_of(body)
    what = said or f"HTTP {status}: {reason}"
    if status in (429, 503):
        return OverloadedError(what, method, url, status, _seconds(retry_after))
    kind = _BY_STATUS.get(status) or (ServerError if status >= 500 else BadRequestError)
    error = kind(what, method, url, status)
    if detail:
        error.detail = detail
        error.add_note(detail)
    return error


def _texts_of(body: bytes) -> tuple[str, str]:
    """The fields `error` and `detail` of a JSON response; empty where there are none."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "", ""
    error, detail = (text if isinstance(text, str) else "" for text in (found.error, found.detail))
    return error, detail


def _seconds(text: str) -> float | None:
    """`Retry-After` in seconds; None for a date or an invalid value."""
    return float(text) if text.isascii() and text.isdigit() else None
