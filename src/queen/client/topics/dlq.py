"""The dead letters of a topic."""

from __future__ import annotations

from typing import Self

from queen.client.topics.calls import TopicCalls, TopicSource, refs_of
from queen.client.topics.items import GivenItems, TopicItem, decode_items


class TopicDlqOptions:
    """Which dead letters of a topic, the oldest first."""

    def __init__(self, calls: TopicCalls, source: TopicSource) -> None:
        self._calls = calls
        self._source = source
        self._limit = 100
        self._offset = 0

    def limit(self, count: int) -> Self:
        """At most so many."""
        self._limit = max(1, count)
        return self

    def offset(self, count: int) -> Self:
        """Leave out the first."""
        self._offset = max(0, count)
        return self

    async def _get(self) -> list[TopicItem]:
        answer = await self._calls.get_raw(
            "/dlq",
            namespace=self._source.namespace,
            topic=self._source.names[0],
            limit=self._limit,
            offset=self._offset,
        )
        return decode_items(answer.body)

    async def _retry(self, letters: GivenItems | None) -> int:
        return await self._each("dlq/retry", letters)

    async def _delete(self, letters: GivenItems | None) -> int:
        return await self._each("dlq/delete", letters)

    async def _each(self, verb: str, letters: GivenItems | None) -> int:
        chosen = await self._get() if letters is None else letters
        return len(await self._calls.settle_all(verb, refs_of(chosen, self._source)))


class TopicDlq(TopicDlqOptions):
    """`topic(...).dlq()`: look at dead letters, send them round again, or throw them away."""

    async def get(self) -> list[TopicItem]:
        """The dead letters."""
        return await self._get()

    async def retry(self, letters: GivenItems | None = None) -> int:
        """Make these, or those that `get()` would give, ready items again, as if they had never failed; how many.

        Raises `NotFoundError` when one of them is no dead letter; the others are ready then.
        """
        return await self._retry(letters)

    async def delete(self, letters: GivenItems | None = None) -> int:
        """Throw these, or those that `get()` would give, away; how many. Raises as `retry` does."""
        return await self._delete(letters)
