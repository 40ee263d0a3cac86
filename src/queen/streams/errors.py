"""The exceptions of streams.

QueenError
└── StreamsError
    ├── StreamsHttpError            a request failed; `status` and `body` of the response
    ├── StreamsRegisterFailed       the query could not be registered
    │   └── StreamsConfigHashMismatch   it is registered with a different chain of operators
    ├── StreamsStateGetFailed       state could not be read
    └── StreamsCycleFailed          a cycle was rejected and not applied
        └── StateChanged                its state was changed concurrently
"""

from __future__ import annotations

from typing import Any

from queen.errors import QueenError


class StreamsError(QueenError):
    """Base class of errors of streams."""

    code = "STREAMS_ERROR"


class StreamsHttpError(StreamsError):
    """A request failed, or was rejected by the server."""

    code = "STREAMS_HTTP_ERROR"

    def __init__(self, message: str, status: int | None = None, body: Any = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class StreamsRegisterFailed(StreamsError):
    """The query could not be registered."""

    code = "STREAMS_REGISTER_FAILED"


class StreamsConfigHashMismatch(StreamsRegisterFailed):
    """The query is registered with a different chain of operators."""

    code = "STREAMS_CONFIG_HASH_MISMATCH"


class StreamsStateGetFailed(StreamsError):
    """State could not be read."""

    code = "STREAMS_STATE_GET_FAILED"


class StreamsCycleFailed(StreamsError):
    """A cycle was rejected and not applied."""

    code = "STREAMS_CYCLE_FAILED"

    def __init__(self, message: str, body: Any = None) -> None:
        super().__init__(message)
        self.body = body


class StateChanged(StreamsCycleFailed):
    """The state that the cycle read was changed concurrently."""
