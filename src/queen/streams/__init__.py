"""Streams: windows, aggregates and gates over queues, exactly once.

State changes, pushes and the acknowledgment of the source are committed in one transaction of the server, so a stream
resumes from its last commit after a crash.
"""

from queen.streams.broker import Broker, HttpBroker, PopRequest
from queen.streams.errors import (
    StateChanged,
    StreamsConfigHashMismatch,
    StreamsCycleFailed,
    StreamsError,
    StreamsHttpError,
    StreamsRegisterFailed,
    StreamsStateGetFailed,
)
from queen.streams.gates import GateContext
from queen.streams.helpers import sliding_window_gate, token_bucket_gate
from queen.streams.runner import Runner
from queen.streams.stream import Stream

__all__ = [
    "Broker",
    "GateContext",
    "HttpBroker",
    "PopRequest",
    "Runner",
    "StateChanged",
    "Stream",
    "StreamsConfigHashMismatch",
    "StreamsCycleFailed",
    "StreamsError",
    "StreamsHttpError",
    "StreamsRegisterFailed",
    "StreamsStateGetFailed",
    "sliding_window_gate",
    "token_bucket_gate",
]
