"""The report as tables for a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.report import Judged, Report, Summary

ABSENT = "-"
HEADINGS = (
    "msg/s",
    "lowest..highest",
    "p50 ms",
    "p99 ms",
    "CPU s",
    "CPU µs per message",
    "memory MB",
    "also",
)


def show(report: Report, console: Console) -> None:
    """Prints where and how it was measured, every workload, every bar, and what was wrong."""
    show_environment(report, console)
    console.print(workload_table(report.summaries))
    if report.bars:
        console.print(bar_table(report.bars))
    for warning in report.environment.warnings:
        console.print(Text(f"! {warning}", style="bold red"))
    for summary in report.summaries:
        if summary.errors:
            text = f"! {summary.workload}: {summary.errors} errors; the first: {summary.first_error}"
            console.print(Text(text, style="bold red"))


def show_environment(report: Report, console: Console) -> None:
    e = report.environment
    console.print(f"{e.machine}, {e.cores} cores, load average {e.load_average:.1f} before")
    console.print(f"server: {e.workers} workers, Python {e.python}")
    if e.postgres:
        settings = ", ".join(f"{name}={value}" for name, value in e.postgres.items())
        console.print(f"PostgreSQL: {settings}")
    console.print(
        f"payloads: {e.payload_bytes:.0f} bytes on average; 100 messages compress {e.payload_compression:.2f}"
        f" times (zlib); {e.partitions} partitions unless a workload says otherwise"
    )


def workload_table(summaries: list[Summary]) -> Table:
    table = Table(title="Workloads: medians; CPU of server / PostgreSQL / generator / everything else")
    table.add_column("workload")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for summary in summaries:
        if summary.workload != "server":
            table.add_row(*workload_row(summary), style="red" if summary.errors else "")
    return table


def workload_row(summary: Summary) -> list[str]:
    rate = summary.metrics.get("messages_per_s")
    return [
        summary.title,
        value(summary, "messages_per_s", ",.0f"),
        f"{rate.lowest:,.0f}..{rate.highest:,.0f}" if rate and summary.repetitions > 1 else "",
        value(summary, "p50_ms", ".2f"),
        value(summary, "p99_ms", ".2f"),
        joined(summary, ("server_cpu_s", "postgres_cpu_s", "generator_cpu_s", "other_cpu_s"), ".1f"),
        joined(summary, ("server_us", "postgres_us", "generator_us"), ".1f"),
        value(summary, "memory_mb", ".0f"),
        ", ".join(extras(summary)),
    ]


def extras(summary: Summary) -> list[str]:
    shown = {
        "share_of_limit": ("of the limit", ".0%"),
        "share_of_one": ("of 1 partition", ".0%"),
        "commits": ("commits", ".2f"),
        "bytes_per_message": ("bytes per message", ".0f"),
        "in_per_s": ("in/s", ",.0f"),
        "out_per_s": ("out/s", ",.0f"),
        "backlog_at_end": ("backlog", ",.0f"),
        "backlog_growth": ("backlog growth", ".2%"),
    }
    return [
        f"{summary.metrics[name].median:{style}} {unit}"
        for name, (unit, style) in shown.items()
        if name in summary.metrics
    ]


def value(summary: Summary, metric: str, style: str) -> str:
    spread = summary.metrics.get(metric)
    return f"{spread.median:{style}}" if spread else ""


def joined(summary: Summary, metrics: tuple[str, ...], style: str) -> str:
    parts = [value(summary, metric, style) or ABSENT for metric in metrics]
    return " / ".join(parts) if any(part != ABSENT for part in parts) else ""


def bar_table(bars: list[Judged]) -> Table:
    table = Table(title="Bars")
    table.add_column("what")
    for heading in ("C++ server", "wanted", "measured", ""):
        table.add_column(heading, justify="right")
    for bar in bars:
        verdict = Text("pass", style="green") if bar.passed else Text("FAIL", style="bold red")
        number = f"{bar.value:,.0f}" if bar.value >= 1000 else f"{bar.value:,.3g}"
        table.add_row(bar.title, bar.peer, bar.wanted, number, verdict)
    return table
