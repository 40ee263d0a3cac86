"""What was measured: the numbers of every repetition, their ratios, their medians."""

from statistics import median

import msgspec

from bench.generator import Second


class Measurement(msgspec.Struct):
    """One workload of one repetition. Metrics that could not be measured are absent."""

    workload: str
    title: str
    repetition: int
    metrics: dict[str, float]
    errors: int = 0
    first_error: str = ""
    series: list[Second] = []


class Spread(msgspec.Struct, frozen=True):
    """A number over all repetitions."""

    median: float
    lowest: float
    highest: float


class Summary(msgspec.Struct):
    """One workload over all repetitions."""

    workload: str
    title: str
    repetitions: int
    metrics: dict[str, Spread]
    errors: int
    first_error: str


class Environment(msgspec.Struct):
    """Everything a reader needs to judge the numbers."""

    started: str
    machine: str
    cores: int
    python: str
    workers: int
    seconds: float
    partitions: int
    load_average: float
    postgres: dict[str, str]
    payload_bytes: float
    payload_compression: float
    durable: bool = True
    warnings: list[str] = []


class Judged(msgspec.Struct, frozen=True):
    """A bar as it is written to the results file."""

    title: str
    wanted: str
    peer: str
    value: float
    passed: bool


class Report(msgspec.Struct):
    """The results file."""

    environment: Environment
    summaries: list[Summary]
    bars: list[Judged]
    measurements: list[Measurement]


def add_derived(measurements: list[Measurement]) -> None:
    """Adds, for each repetition, the ratios between numbers that were measured side by side."""
    found = {(each.repetition, each.workload): each.metrics for each in measurements}
    for (repetition, workload), metrics in found.items():
        rate = metrics.get("messages_per_s")
        if rate is None:
            continue
        size = workload.removeprefix("push")
        limit = found.get((repetition, f"limit{size}"), {}).get("messages_per_s")
        if limit and workload.startswith("push"):
            metrics["share_of_limit"] = rate / limit
        base, _, partitions = workload.partition("-p")
        one = found.get((repetition, f"{base}-p1"), {}).get("messages_per_s")
        if one and partitions.isdigit():
            metrics["share_of_one"] = rate / one


def summarize(measurements: list[Measurement]) -> dict[str, Summary]:
    """Medians per workload, in the order they ran; `server` holds what concerns all of them."""
    by_workload: dict[str, list[Measurement]] = {}
    for each in measurements:
        by_workload.setdefault(each.workload, []).append(each)
    summaries = {name: summarize_one(group) for name, group in by_workload.items()}
    peaks = [each.metrics["memory_mb"] for each in measurements if each.metrics.get("memory_mb")]
    if peaks:
        highest = Spread(max(peaks), max(peaks), max(peaks))
        summaries["server"] = Summary(
            "server", "server memory, highest of all workloads", 1, {"peak_memory_mb": highest}, 0, ""
        )
    return summaries


def summarize_one(group: list[Measurement]) -> Summary:
    names = dict.fromkeys(name for each in group for name in each.metrics)
    return Summary(
        workload=group[0].workload,
        title=group[0].title,
        repetitions=len(group),
        metrics={name: spread_of(name, group) for name in names},
        errors=sum(each.errors for each in group),
        first_error=next((each.first_error for each in group if each.first_error), ""),
    )


def spread_of(metric: str, group: list[Measurement]) -> Spread:
    values = [each.metrics[metric] for each in group if metric in each.metrics]
    return Spread(median(values), min(values), max(values))
