"""What the server says of itself: its settings, shards, streaming queries, pipelines and connections."""

from __future__ import annotations

from datetime import datetime

from queen.wire.api.fields import Answer
from queen.wire.pipelines import PipelineStatus


class _Answer(Answer, kw_only=True):
    """Fields are written as everywhere in the API."""


class SettingInForce(_Answer):
    """A setting, its value, and where that comes from. Secrets are not shown."""

    variable: str
    value: str
    default: str
    unit: str
    meaning: str
    source: str
    """`default`, `environment` or `command line`."""


class SettingsInForce(_Answer):
    """Every setting, in the order of their documentation."""

    worker_id: int
    settings: list[SettingInForce]


class ShardView(_Answer):
    """One PostgreSQL and what lives there; the counts are null while it is unavailable."""

    shard: int
    up: bool
    database: str
    queues: int | None = None
    partitions: int | None = None
    topics: int | None = None
    bytes: int | None = None


class ShardList(_Answer):
    """All shards, by number."""

    shards: list[ShardView]


class StreamQueryView(_Answer):
    """A streaming query and the state it keeps."""

    query_id: str
    name: str
    source_queue: str
    sink_queue: str | None
    config_hash: str
    shard: int
    partitions: int
    state_rows: int
    changed_at: datetime | None
    created_at: datetime


class StreamQueryList(_Answer):
    """All streaming queries, by name."""

    queries: list[StreamQueryView]


class PipelineList(_Answer):
    """The pipelines that run on this host, or have run."""

    pipelines: list[PipelineStatus]


class TopicNamespaceView(_Answer):
    """A namespace of topics."""

    namespace: str
    topics: int
    quota_per_minute: int | None


class TopicNamespaceList(_Answer):
    """The namespaces of topics, by name."""

    namespaces: list[TopicNamespaceView]


class LiveCounters(_Answer):
    """What this host has done since its workers started, and what goes on right now. Costs no query."""

    push_messages: int
    pop_messages: int
    ack_messages: int
    http_responses: int
    parked_pops: int
    in_flight: int
    pool_size: int
    pool_active: int


class PeerView(_Answer):
    """Connections from one address, and what they wait for: routes with the number of requests being served."""

    peer: str
    connections: int
    requests: dict[str, int]


class PeerList(_Answer):
    """Who is connected to the worker that answers, the most connections first."""

    worker_id: int
    workers: int
    peers: list[PeerView]
