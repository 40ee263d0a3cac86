"""The dead letters of topics: the list, sending round again, throwing away."""

from __future__ import annotations

from collections.abc import Sequence

from queen.broker.topics.catalog import TopicCatalog, TopicKey, lock_keys
from queen.broker.topics.enqueue import OnFed
from queen.broker.topics.settle import find_places
from queen.storage.database import Database, Record
from queen.wire.topics import ItemRef


class TopicDeadLetters:
    """What can be done about items that were given up on."""

    def __init__(self, database: Database, catalog: TopicCatalog, on_fed: OnFed) -> None:
        self._database = database
        self._catalog = catalog
        self._on_fed = on_fed

    async def page(self, key: TopicKey, limit: int, offset: int) -> list[Record]:
        topic = await self._catalog.one(key)
        return await self._database.fetch("topic_dead_letters", topic.id, limit, offset) if topic is not None else []

    async def delete(self, refs: Sequence[ItemRef]) -> list[bool | None]:
        """For each, whether it was there; None: it was not."""
        places = await find_places(self._catalog, refs)
        if not places:
            return [None] * len(refs)
        rows = await self._database.fetch(
            "topic_delete_dead_letters",
            [place.ref.number for place in places],
            [place.topic_id for place in places],
        )
        done = {places[row["slot"] - 1].index for row in rows}
        return [index in done or None for index in range(len(refs))]

    async def retry(self, refs: Sequence[ItemRef]) -> list[bool | None]:
        """Make them ready items again, with their retries before them; None for those that are not there."""
        places = await find_places(self._catalog, refs)
        if not places:
            return [None] * len(refs)
        rows = await self._database.fetch(
            "topic_retry_dead_letters",
            lock_keys({place.topic_id for place in places}),
            [place.ref.number for place in places],
            [place.topic_id for place in places],
        )
        done = {places[row["slot"] - 1].index for row in rows}
        self._on_fed([((refs[index].namespace, refs[index].topic), 0.0) for index in sorted(done)])
        return [index in done or None for index in range(len(refs))]
