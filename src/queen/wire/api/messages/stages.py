"""Structs of the routes about staged publishing."""

from __future__ import annotations

from queen.wire.api.fields import Answer, Count
from queen.wire.stages import Shard


class StagedPlace(Answer):
    """How many messages of the piece are on one shard."""

    shard: Shard
    messages: Count


class Staged(Answer):
    """How many messages the piece held, and on which shards they are."""

    staged: Count
    shards: list[StagedPlace]


class PublishedBatch(Answer):
    """What the batch came to; `repeated`: it was published before, and nothing was done now."""

    messages: Count
    duplicates: Count
    repeated: bool


class AbandonedBatch(Answer):
    """How many messages were removed."""

    removed: Count
