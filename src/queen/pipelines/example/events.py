"""Events for the example: half an hour of visitors, made up, the same every time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

_BEGIN: Final = datetime(2026, 11, 15, 9, 0, tzinfo=UTC)
_MINUTES: Final = 30
_KINDS: Final = (("visit", 70), ("download", 18), ("pricing", 9), ("demo", 3))
# How busy each company is, and how that changes over the half hour.
_COMPANIES: Final = (
    ("acme.example", 4, 0.0),
    ("globex.example", 2, 0.1),
    ("initech.example", 1, 0.0),
    ("hooli.example", 1, 0.3),
)


def lead_events(count: int, seed: int = 7) -> Iterator[dict[str, Any]]:
    """So many events in the order of time, some twice, a few that cannot be used, and the time at the end."""
    chance = random.Random(seed)
    for number in range(count):
        minute = _MINUTES * number / count
        at = _BEGIN + timedelta(minutes=minute)
        if number % 97 == 13:
            yield {"email": f"someone@nowhere{number % 3}.example", "kind": "visit", "at": at.isoformat()}
            continue
        if number % 211 == 17:
            yield {"email": "someone@acme.example", "kind": "visit", "at": "some time ago"}
            continue
        weights = [busy + growth * minute for _, busy, growth in _COMPANIES]
        ((domain, _, _),) = chance.choices(_COMPANIES, weights)
        ((kind, _),) = chance.choices(_KINDS, [share for _, share in _KINDS])
        event = {
            "email": f"visitor{chance.randrange(50)}@{domain}",
            "kind": kind,
            "at": (at - timedelta(seconds=chance.choice((0, 0, 0, 30, 90)))).isoformat(),
        }
        yield event
        if number % 50 == 0:
            yield event
    # Windows close when time has passed them; this says that it has.
    yield {"email": "clock@queen", "kind": "clock", "at": (_BEGIN + timedelta(minutes=_MINUTES + 30)).isoformat()}
