"""Views of the whole, made of those of the shards. What workers have counted over time is kept by shard 0 for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from queen.http.placement.merging import Json, summed

# Of what is stored now, as each shard tells of itself.
_STANDING: Final = ("total", "pending", "processing", "completed", "deadLetter")


def overview(answers: Sequence[Json]) -> Json:
    """Counts are added; lags and throughput are those of shard 0, which has counted for all."""
    first = answers[0]
    offsets = [answer["lag"]["offset"] for answer in answers]
    behind = [one for one in offsets if one["max"]] or offsets[:1]
    return first | {
        **{key: sum(answer[key] for answer in answers) for key in ("queues", "partitions")},
        # Shards may have the same ones: there are at least as many as the shard has that has the most.
        **{key: max(answer[key] for answer in answers) for key in ("namespaces", "tasks")},
        "messages": first["messages"] | _standing(answers),
        "lag": first["lag"]
        | {
            "offset": {
                "avg": round(sum(one["avg"] for one in behind) / len(behind), 3),
                "median": round(sum(one["median"] for one in behind) / len(behind), 3),
                "min": min(one["min"] for one in behind),
                "max": max(one["max"] for one in behind),
            }
        },
    }


def status(answers: Sequence[Json]) -> Json:
    """Queues, leases and dead letters are added; the series are those of shard 0."""
    first = answers[0]
    errors: dict[str, int] = {}
    for answer in answers:
        for one in answer["deadLetterQueue"]["topErrors"]:
            errors[one["error"]] = errors.get(one["error"], 0) + one["count"]
    letters = summed([answer["deadLetterQueue"] for answer in answers])
    letters["topErrors"] = [
        {"error": error, "count": count} for error, count in sorted(errors.items(), key=lambda one: -one[1])[:10]
    ]
    return first | {
        "queues": [queue for answer in answers for queue in answer["queues"]],
        "messages": first["messages"] | _standing(answers),
        "leases": summed([answer["leases"] for answer in answers]),
        "deadLetterQueue": letters,
    }


def stored(answers: Sequence[Json]) -> Json:
    """How many messages each stretch of time has left: the stretches are the same everywhere."""
    points = zip(*(answer["dataPoints"] for answer in answers), strict=False)
    return answers[0] | {
        "dataPoints": [point[0] | {"messages": sum(one["messages"] for one in point)} for point in points]
    }


def retention(answers: Sequence[Json]) -> Json:
    buckets: dict[str, list[Json]] = {}
    for answer in answers:
        for point in answer["series"]:
            buckets.setdefault(point["bucket"], []).append(point)
    return answers[0] | {
        "series": [summed(buckets[bucket]) for bucket in sorted(buckets)],
        "totals": summed([answer["totals"] for answer in answers]),
    }


def worker_metrics(answers: Sequence[Json]) -> Json:
    pending = sum(answer["summary"]["pendingMessages"] for answer in answers)
    return answers[0] | {"summary": answers[0]["summary"] | {"pendingMessages": pending}}


def postgres(answers: Sequence[Json]) -> Json:
    """Those of shard 0 as ever, and of every shard."""
    return answers[0] | {"shards": list(answers)}


def buffers(answers: Sequence[Json]) -> Json:
    return summed(answers) | {"dbHealthy": all(answer["dbHealthy"] for answer in answers)}


def modes(answers: Sequence[Json]) -> Json:
    """A mode is on when it is on everywhere."""
    return summed(answers)


def _standing(answers: Sequence[Json]) -> dict[str, int]:
    return {key: sum(answer["messages"][key] for answer in answers) for key in _STANDING}


def write_modes(answers: Sequence[Json]) -> Json:
    """Every shard has been told the same; one that was away has yet to hear of it."""
    return dict(sorted({namespace: mode for answer in reversed(answers) for namespace, mode in answer.items()}.items()))


def write_mode(answers: Sequence[Json]) -> Json:
    return answers[0]
