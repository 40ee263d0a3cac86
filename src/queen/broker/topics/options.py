"""The options of a topic: their names on the wire, their types and their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from queen.broker.queue_options import Option, OptionValue
from queen.broker.topics.catalog import Topic
from queen.errors import BadRequest

# In the order of the parameters of `topic_configure`.
TOPIC_OPTIONS: Final = (
    Option("max_retries", "max_retries", 3, largest=1_000_000),
    Option("backoff_base_ms", "backoff_base_ms", 1000, "milliseconds", largest=86_400_000),
    Option("backoff_cap_ms", "backoff_cap_ms", 300_000, "milliseconds", largest=86_400_000),
    Option("lease_seconds", "lease_seconds", 30, "seconds", largest=604_800),
    Option("at_most_once", "at_most_once", False),
    Option("ttl_seconds", "ttl_seconds", None, "seconds"),
)
_NAMES: Final = frozenset(option.name for option in TOPIC_OPTIONS)


def read_topic_options(sent: Mapping[str, object] | None, topic: Topic) -> list[OptionValue]:
    """What to store for each of `TOPIC_OPTIONS`: as sent, null for the default, else as it was."""
    sent = sent or {}
    unknown = sorted(sent.keys() - _NAMES)
    if unknown:
        raise BadRequest(f"there is no option {unknown[0]!r}; there are {', '.join(sorted(_NAMES))} (at options)")
    values = [
        option.read(sent[option.name]) if option.name in sent else getattr(topic, option.column)
        for option in TOPIC_OPTIONS
    ]
    if sent.get("lease_seconds") == 0:
        raise BadRequest("option lease_seconds must be at least 1 (at options.lease_seconds)")
    return values


def echo_topic_options(topic: Topic) -> dict[str, OptionValue]:
    """The options of a topic as clients are told them."""
    return {option.name: getattr(topic, option.column) for option in TOPIC_OPTIONS}
