"""The server itself: its settings, shards, streaming queries, pipelines and connections."""

from __future__ import annotations

from datetime import datetime

from queen.wire.fields import Answer


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


class TopicNamespaceView(_Answer):
    """A namespace of topics."""

    namespace: str
    topics: int
    quota_per_minute: int | None
    limit_per_minute: int | None
    """In force, by a quota or by the settings; null: unlimited."""
    used_last_minute: int | None
    """Items counted in the last minute, with those that workers have reserved; null: unlimited."""


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
    """The clients connected to this host, the most connections first; `workerId` is the worker that answers."""

    worker_id: int
    workers: int
    peers: list[PeerView]
