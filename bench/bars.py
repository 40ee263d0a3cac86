"""The bars: what each measured number must reach, next to what the C++ server reached on such a machine."""

from dataclasses import dataclass

from bench.report import Summary


@dataclass(frozen=True)
class Bar:
    """One number of one workload and the side on which it must lie."""

    workload: str
    metric: str
    title: str
    peer: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def wanted(self) -> str:
        return f"≥ {self.at_least:,g}" if self.at_least is not None else f"≤ {self.at_most:,g}"

    def holds(self, value: float) -> bool:
        if self.at_least is not None and value < self.at_least:
            return False
        return self.at_most is None or value <= self.at_most


def throughput(workload: str, title: str, peer: str, at_least: float) -> Bar:
    return Bar(workload, "messages_per_s", f"{title}, msg/s", peer, at_least=at_least)


BARS = (
    throughput("push1", "push 1", "3,350", 15_000),
    throughput("push10", "push 10", "10,200", 55_000),
    throughput("push100", "push 100", "17,200", 110_000),
    throughput("push1000", "push 1000", "20,600", 160_000),
    throughput("pop1", "pop 1 autoAck", "1,250", 8_000),
    throughput("pop100", "pop 100 autoAck", "22,600", 130_000),
    throughput("pop1000", "pop 1000 autoAck", "36,900", 190_000),
    throughput("pop-ack", "pop 100 + batch ack, 16 connections", "8,800", 60_000),
    Bar("mixed", "in_per_s", "push and pop at once, in, msg/s", "", at_least=50_000),
    Bar("mixed", "out_per_s", "push and pop at once, out, msg/s", "", at_least=50_000),
    Bar("mixed", "backlog_growth", "push and pop at once, backlog growth / in", "", at_most=0.01),
    Bar("latency-push", "commits", "one push on one connection, p50 in commits", "6.9 ms", at_most=1.5),
    Bar("park", "p50_ms", "push to parked pop, p50 ms", "69", at_most=5),
    Bar("park", "p99_ms", "push to parked pop, p99 ms", "74", at_most=20),
    Bar("park-idle", "p50_ms", "push to parked pop after 3 s idle, p50 ms", "415", at_most=5),
    Bar("park-idle", "p99_ms", "push to parked pop after 3 s idle, p99 ms", "1,011", at_most=20),
    Bar("push100-p10000", "share_of_one", "push 100, 10 000 partitions against 1", "0.71", at_least=0.75),
    Bar("pop100-p10000", "share_of_one", "pop 100, 10 000 partitions against 1", "0.71", at_least=0.75),
    Bar("push100", "share_of_limit", "share of the limit, push 100 (aim: 0.6)", "", at_least=0.30),
    Bar("server", "peak_memory_mb", "server memory at peak, all workers, MB", "175", at_most=300),
    Bar("storage", "bytes_per_message", "stored bytes per message", "645", at_most=330),
)


@dataclass(frozen=True)
class Verdict:
    """A bar and what was measured for it."""

    bar: Bar
    value: float
    passed: bool


def judge(summaries: dict[str, Summary]) -> list[Verdict]:
    """A verdict for every bar whose number was measured in this run, by its median."""
    verdicts = []
    for bar in BARS:
        summary = summaries.get(bar.workload)
        if summary is None or bar.metric not in summary.metrics:
            continue
        value = summary.metrics[bar.metric].median
        verdicts.append(Verdict(bar, value, bar.holds(value) and summary.errors == 0))
    return verdicts
