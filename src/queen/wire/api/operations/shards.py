"""Structs of the routes about shards."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from queen.wire.fields import Answer, Body, Count, Name, Time


class ShardView(Answer, kw_only=True):
    """One PostgreSQL and what lives there; the counts are null while it is unavailable."""

    shard: int
    up: bool
    database: str
    queues: int | None = None
    partitions: int | None = None
    topics: int | None = None
    bytes: int | None = None


class ShardList(Answer, kw_only=True):
    """All shards, by number."""

    shards: list[ShardView]


class ShardMove(Body, kw_only=True):
    """A queue, or a topic, and the shard that it goes to."""

    queue: Name | None = None
    namespace: Name | None = None
    topic: Name | None = None
    to: Annotated[int, Meta(ge=0, le=65535, description="The number of the shard.")]


class ShardMoved(Answer):
    """Whether it was elsewhere before; while it is `running`, this is not known yet."""

    name: str
    to: int
    moved: bool
    running: bool


class MoveView(Answer):
    """A move that has not ended; `phase` and counts are known to the worker that runs it."""

    name: str
    from_shard: int
    to_shard: int
    begun_at: Time
    phase: str | None
    done: Count | None
    total: Count | None


class MoveList(Answer):
    """Moves that have not ended, oldest first. One that was interrupted is among them until it is run again."""

    moves: list[MoveView]
