"""What every route does, takes and answers: one table per module of routes, by `METHOD /pattern`.

A new route is described by one entry in the table of its module. A new module is named in `_TABLES` below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from queen.http.openapi.operation import Operation
from queen.http.operations import (
    analytics,
    cluster,
    consume,
    dead_letters,
    documentation,
    groups,
    health,
    maintenance,
    messages,
    messaging,
    metrics,
    queues,
    reading,
    stages,
    status,
    streams,
    system,
    topics,
    traces,
)

_TABLES: Final = (
    messaging,
    consume,
    queues,
    groups,
    messages,
    reading,
    dead_letters,
    traces,
    maintenance,
    status,
    analytics,
    metrics,
    streams,
    stages,
    topics,
    cluster,
    system,
    health,
    documentation,
)

TAGS: Final[Mapping[str, str]] = {
    "Messaging": "Storing messages, taking them, and saying what became of them.",
    "Queues": "Making queues, setting their options, and seeing what there is.",
    "Consumer groups": "Where groups are, and moving them.",
    "Messages": "Looking at single messages, and doing things to them.",
    "Dead letters": "Messages that were given up on.",
    "Topics": "Priority queues with delayed delivery, retries and quotas.",
    "Traces": "What consumers say about a message while they work on it.",
    "Streams": "Windows and state of stream processors.",
    "Staging": "Batches of messages that are written in pieces and published together, once.",
    "Status": "How the server and its queues are doing, now and over time.",
    "System": "Maintenance, and what servers tell each other.",
    "Health": "Probes for load balancers and people.",
    "Documentation": "This description.",
}


def all_operations() -> dict[str, Operation]:
    """The descriptions of all routes, by `METHOD /pattern`."""
    return {key: operation for table in _TABLES for key, operation in table.OPERATIONS.items()}
