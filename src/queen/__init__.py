"""Queen: a message queue, task queue and stream platform on PostgreSQL.

from queen import Queen, the asynchronous client, or QueenSync, the same for scripts and notebooks.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from queen.client.client import Admin, Queen
    from queen.client.config import BUFFER_DEFAULTS, CLIENT_DEFAULTS, CONSUME_DEFAULTS, POP_DEFAULTS, QUEUE_DEFAULTS
    from queen.client.errors import (
        AuthError,
        BadRequestError,
        ClientClosedError,
        ConflictError,
        DeadLetterError,
        LeaseLostError,
        LockLostError,
        NotFoundError,
        OverloadedError,
        PreconditionError,
        PushError,
        QueenConnectionError,
        QueenTimeoutError,
        RequestError,
        ServerError,
        TransactionError,
        UnsentError,
        UnsentMessage,
    )
    from queen.client.sync import QueenSync
    from queen.client.topics.items import NackResponse, TopicCounts, TopicItem
    from queen.client.types import AckResponse, BufferStats, DLQResponse, Message, TransactionResponse
    from queen.errors import QueenError
    from queen.streams import Stream, sliding_window_gate, token_bucket_gate

__version__ = "0.1.0"

if next(Path(__file__).parents[1].glob("queen_mq-*.dist-info"), None) is not None:
    warnings.warn(
        "the distribution queen-mq is installed beside queen-broker, and both are the package `queen`: "
        "uninstall one of them, and install the other again",
        stacklevel=2,
    )

__all__ = [
    "BUFFER_DEFAULTS",
    "CLIENT_DEFAULTS",
    "CONSUME_DEFAULTS",
    "POP_DEFAULTS",
    "QUEUE_DEFAULTS",
    "AckResponse",
    "Admin",
    "AuthError",
    "BadRequestError",
    "BufferStats",
    "ClientClosedError",
    "ConflictError",
    "DLQResponse",
    "DeadLetterError",
    "LeaseLostError",
    "LockLostError",
    "Message",
    "NackResponse",
    "NotFoundError",
    "OverloadedError",
    "PreconditionError",
    "PushError",
    "Queen",
    "QueenConnectionError",
    "QueenError",
    "QueenSync",
    "QueenTimeoutError",
    "RequestError",
    "ServerError",
    "Stream",
    "TopicCounts",
    "TopicItem",
    "TransactionError",
    "TransactionResponse",
    "UnsentError",
    "UnsentMessage",
    "__version__",
    "sliding_window_gate",
    "token_bucket_gate",
]

_HOMES = {
    "queen.client.client": ("Admin", "Queen"),
    "queen.client.sync": ("QueenSync",),
    "queen.streams": ("Stream", "sliding_window_gate", "token_bucket_gate"),
    "queen.client.types": ("AckResponse", "BufferStats", "DLQResponse", "Message", "TransactionResponse"),
    "queen.client.topics.items": ("NackResponse", "TopicCounts", "TopicItem"),
    "queen.client.config": tuple(name for name in __all__ if name.endswith("_DEFAULTS")),
    "queen.client.errors": (*(name for name in __all__ if name.endswith("Error")), "UnsentMessage"),
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used: the server imports this package, and never needs the client."""
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'queen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
