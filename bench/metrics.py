"""Metrics computed from the counters of the generator and of the processes."""

from bench.generator import LoadResult, Second
from bench.processes import Usage

MEGABYTE = 1_000_000


def load_metrics(result: LoadResult, latency: str) -> dict[str, float]:
    """Throughput, and the quantiles of the one histogram that the workload is about."""
    shown = {"push_ms": result.push_ms, "pop_ms": result.pop_ms, "ack_ms": result.ack_ms}[latency]
    metrics = {
        "messages": float(result.messages),
        "seconds": result.seconds,
        "drained": float(result.drained),
        "empty": float(result.empty),
        "p50_ms": shown.p50,
        "p90_ms": shown.p90,
        "p99_ms": shown.p99,
        "max_ms": shown.max,
    }
    if result.mode != "park":  # its rounds mostly wait: a rate of them means nothing
        metrics |= {"messages_per_s": result.messages_per_s, "requests_per_s": result.requests_per_s}
    if result.ack_ms.count:
        metrics |= {"ack_p50_ms": result.ack_ms.p50, "ack_p99_ms": result.ack_ms.p99}
    if result.mode == "mixed":
        metrics |= mixed_metrics(result)
    return metrics


def mixed_metrics(result: LoadResult) -> dict[str, float]:
    metrics = {"in_per_s": result.pushed / result.seconds, "out_per_s": result.acked / result.seconds}
    if len(result.series) >= 5 and metrics["in_per_s"] > 0:
        metrics["backlog_at_end"] = float(result.series[-1].backlog)
        metrics["backlog_growth"] = backlog_slope(result.series) / metrics["in_per_s"]
    return metrics


def backlog_slope(series: list[Second]) -> float:
    """Messages by which the backlog grows each second: least squares, without the first fifth (the start)."""
    backlog = [second.backlog for second in series[len(series) // 5 :]]
    middle_time, middle_backlog = (len(backlog) - 1) / 2, sum(backlog) / len(backlog)
    covariance = sum((time - middle_time) * (value - middle_backlog) for time, value in enumerate(backlog))
    return covariance / sum((time - middle_time) ** 2 for time in range(len(backlog)))


def usage_metrics(usage: Usage, result: LoadResult) -> dict[str, float]:
    """CPU seconds of each layer in the measured time; `other` is everything else on the machine."""
    metrics = {"generator_cpu_s": result.cpu_s}
    if usage.peak_memory_bytes:
        metrics["memory_mb"] = usage.peak_memory_bytes / MEGABYTE
    if usage.cpu is None or not usage.cpu.server:
        return metrics
    metrics["server_cpu_s"] = usage.cpu.server
    metrics["postgres_cpu_s"] = usage.cpu.postgres
    metrics["other_cpu_s"] = max(0.0, usage.cpu.machine - usage.cpu.server - usage.cpu.postgres - result.cpu_s)
    if result.messages:
        for layer in ("server", "postgres", "generator"):
            metrics[f"{layer}_us"] = metrics[f"{layer}_cpu_s"] / result.messages * 1e6
    return metrics
