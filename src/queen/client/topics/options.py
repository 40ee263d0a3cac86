"""The words of a sentence about topics; each returns the builder for the next one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Self

from queen.client.consume_words import ConsumeWords
from queen.client.consumer import ConsumeOptions
from queen.client.topics.items import checked_time


class ItemOptions:
    """What has been said about items to enqueue."""

    # Defaults live on the class: a builder is made for every enqueue, and sets only what is said.
    _item: Mapping[str, Any] = {}
    _make_keys = True

    def priority(self, number: int) -> Self:
        """The urgency of items: lower is served first, 0 by default."""
        return self._say(priority=number)

    def deliver_after(self, moment: datetime | str | None) -> Self:
        """Nobody gets the items before this time; a datetime needs its time zone. The last word on time counts."""
        return self._say(deliver_after=checked_time(moment), delay=None)

    def delay(self, seconds: float) -> Self:
        """Nobody gets the items for so many seconds."""
        return self._say(delay=seconds, deliver_after=None)

    def ttl(self, seconds: float) -> Self:
        """Items that nobody took so many seconds after they were due are removed."""
        return self._say(ttl=seconds)

    def metadata(self, values: Mapping[str, Any]) -> Self:
        """A JSON object that goes along with items."""
        return self._say(metadata=dict(values))

    def idempotency_key(self, key: str | None) -> Self:
        """However often an item with this key is enqueued to the namespace, it is one item.

        Where nothing is said, the client makes a key, and an enqueue whose answer was lost is repeated without harm.
        None: there is to be no key, which costs the server less, and such an enqueue is not repeated.
        """
        self._make_keys = key is not None
        return self._say(idempotency_key=key)

    def _say(self, **words: Any) -> Self:
        said = {**self._item, **words}
        self._item = {name: value for name, value in said.items() if value is not None}
        return self


class TopicOptions(ConsumeWords, ItemOptions):
    """What has been said about a topic, or about several."""

    _lease: float | None = None
    _auto_ack = True
    _renew_lease = True

    def lease(self, seconds: float) -> Self:
        """How long dequeued items are leased; where nothing is said, the topic's `lease_seconds` (30)."""
        self._lease = seconds
        return self

    def auto_ack(self, enabled: bool = True) -> Self:
        """Whether `consume` settles items as the handler turns out; topics that deliver at most once need it off."""
        self._auto_ack = enabled
        return self

    def renew_lease(self, enabled: bool = True) -> Self:
        """Whether leases are extended while the handler works; they are."""
        self._renew_lease = enabled
        return self

    def _consume_options(self) -> ConsumeOptions:
        return ConsumeOptions(
            batch=self._batch,
            wait=self._wait,
            timeout_millis=self._timeout_millis,
            concurrency=self._concurrency,
            limit=self._limit,
            idle_millis=self._idle_millis,
            auto_ack=self._auto_ack,
            each=self._each,
            renew_lease=self._renew_lease,
        )
