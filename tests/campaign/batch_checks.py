"""What the sink of Spark promises, checked on a history: each batch as a whole, once, in the order of the batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.campaign.history import Call, Violation


class Batches(NamedTuple):
    """What each batch adds to each partition, and what is stored in the end."""

    wanted: Mapping[int, Mapping[str, Sequence[str]]]
    stored: Mapping[str, Sequence[str]]


def check_batches(workload: str, calls: Sequence[Call], final: Batches) -> list[Violation]:
    """Calls are `publish` with the args `batch` and `rows`; of names, the part before the first `/` is the batch."""
    found: list[Violation] = []
    by_batch: dict[int, list[Call]] = {}
    for call in calls:
        by_batch.setdefault(call.args["batch"], []).append(call)

    def report(kind: str, text: str, batch: int) -> None:
        found.append(Violation(workload, kind, text, tuple(by_batch.get(batch, ()))))

    counts = Counter(name for names in final.stored.values() for name in names)
    for name, count in counts.items():
        if count > 1:
            report("doubled", f"{name} is stored {count} times", int(name.partition("/")[0]))
    for batch, partitions in sorted(final.wanted.items()):
        names = [name for added in partitions.values() for name in added]
        missing = [name for name in names if name not in counts]
        answered = any(call.ok for call in by_batch.get(batch, ()))
        if missing and (answered or len(missing) < len(names)):
            kind = "lost" if answered else "half a batch"
            report(kind, f"{', '.join(missing[:5])} of batch {batch} are not stored", batch)
    for partition, stored in final.stored.items():
        wanted = [name for _, added in sorted(final.wanted.items()) for name in added.get(partition, ())]
        there = set(stored)
        in_order = [name for name in wanted if name in there]
        if in_order != list(dict.fromkeys(stored)):
            first = next(pair for pair in zip(in_order, dict.fromkeys(stored), strict=False) if pair[0] != pair[1])
            text = f"{first[1]} stands where {first[0]} belongs, in {partition}"
            report("reordered", text, int(first[1].partition("/")[0]))
    return found
