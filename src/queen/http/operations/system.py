"""Descriptions of what the server says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from queen.http.openapi.operation import DATABASE, Operation
from queen.wire.system import (
    LiveCounters,
    PeerList,
    PipelineList,
    SettingsInForce,
    ShardList,
    StreamQueryList,
    TopicNamespaceList,
)

OPERATIONS: Final[Mapping[str, Operation]] = {
    "GET /api/v1/system/settings": Operation(
        id="settings",
        summary="Settings in force",
        tag="System",
        description="Of the worker that answers, with where each comes from. Secrets are not shown.",
        answers={200: SettingsInForce},
    ),
    "GET /api/v1/system/connections": Operation(
        id="connections",
        summary="Who is connected",
        tag="System",
        description="To the worker that answers, by address, with the requests that are being served.",
        answers={200: PeerList},
    ),
    "GET /api/v1/live": Operation(
        id="live",
        summary="Counters of this host, from memory",
        tag="Status",
        description="Made to be asked for every second: no query is run for it.",
        answers={200: LiveCounters},
    ),
    "GET /api/v1/shards": Operation(
        id="shards",
        summary="Shards and what lives there",
        tag="System",
        answers={200: ShardList},
        errors=DATABASE,
    ),
    "GET /api/v1/streams": Operation(
        id="streams",
        summary="Streaming queries and the state they keep",
        tag="Streams",
        answers={200: StreamQueryList},
        errors=DATABASE,
    ),
    "GET /api/v1/pipelines": Operation(
        id="pipelines",
        summary="Pipelines of this host",
        tag="System",
        description="What runs on Apache Spark beside the server, from the files in which it reports.",
        answers={200: PipelineList},
    ),
    "GET /api/v1/topics/namespaces": Operation(
        id="topicNamespaces",
        summary="List namespaces of topics",
        tag="Topics",
        answers={200: TopicNamespaceList},
        errors=DATABASE,
    ),
}
