"""The context that the components of topics share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from queen.broker.topics.batching import FairShareMaker
from queen.log.topics import TopicCatalog, TopicKey
from queen.metrics.meter import Meter
from queen.storage.database import Database
from queen.wire.ids import IdSource

OnItemsDue: TypeAlias = Callable[[Sequence[tuple[TopicKey, float]]], None]
"""Called with topics that have new or freed items, and in how many seconds the first of them is due."""


@dataclass(frozen=True, slots=True)
class TopicContext:
    """Given to everything that leases or settles items."""

    database: Database
    catalog: TopicCatalog
    ids: IdSource
    meter: Meter
    on_items_due: OnItemsDue
    on_leased: Callable[[float], None]
    """Called with the seconds of each lease that begins or is extended."""
    fair_share: FairShareMaker
    most_bytes: int
    """What one statement leases, unless its first item has more."""
