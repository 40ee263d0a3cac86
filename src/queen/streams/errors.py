"""Every error the streaming SDK raises.

QueenError
└── StreamsError
    ├── StreamsHttpError            no answer, or one that says no; `status` and `body` are the server's
    ├── StreamsRegisterFailed       the query could not be registered
    │   └── StreamsConfigHashMismatch   it is registered with another chain of operators
    ├── StreamsStateGetFailed       state could not be read
    └── StreamsCycleFailed          a cycle was refused; nothing of it happened
        └── StateChanged                because somebody else changed the state it was made from
"""

from __future__ import annotations

from typing import Any

from queen.errors import QueenError


class StreamsError(QueenError):
    """Something went wrong in a stream."""

    code = "STREAMS_ERROR"


class StreamsHttpError(StreamsError):
    """The server could not be reached, or refused the request."""

    code = "STREAMS_HTTP_ERROR"

    def __init__(self, message: str, status: int | None = None, body: Any = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class StreamsRegisterFailed(StreamsError):
    """The query could not be registered."""

    code = "STREAMS_REGISTER_FAILED"


class StreamsConfigHashMismatch(StreamsRegisterFailed):
    """The query is registered with another chain of operators."""

    code = "STREAMS_CONFIG_HASH_MISMATCH"


class StreamsStateGetFailed(StreamsError):
    """State could not be read."""

    code = "STREAMS_STATE_GET_FAILED"


class StreamsCycleFailed(StreamsError):
    """A cycle was refused; nothing of it happened."""

    code = "STREAMS_CYCLE_FAILED"

    def __init__(self, message: str, body: Any = None) -> None:
        super().__init__(message)
        self.body = body


class StateChanged(StreamsCycleFailed):
    """Somebody else changed the state that the cycle was made from."""
