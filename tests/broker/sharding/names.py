"""Names that live on a shard of two."""

from __future__ import annotations

from itertools import count

from queen.wire.shards import Name, home


def queue_on(shard: int, prefix: str = "q", shards: int = 2) -> str:
    """A queue whose hash says this shard."""
    return next(name for number in count() if home(Name.queue(name := f"{prefix}{number}"), range(shards)) == shard)


def topic_on(shard: int, namespace: str = "ns", prefix: str = "t", shards: int = 2) -> str:
    """A topic of a namespace whose hash says this shard."""
    return next(
        name for number in count() if home(Name.topic(namespace, name := f"{prefix}{number}"), range(shards)) == shard
    )


def namespace_on(shard: int, prefix: str = "n", shards: int = 2) -> str:
    """A namespace whose hash says this shard."""
    return next(name for number in count() if home(Name.namespace(name := f"{prefix}{number}"), range(shards)) == shard)
