"""Draws a results file: throughput against its bars, latencies, and the backlog of the mixed workload.

python bench/plot.py bench/results/20260101-120000.json [picture.png]
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

Summaries = list[dict[str, Any]]

MEASURED, BAR, MEDIAN, TAIL = "#3b6ea5", "#c0392b", "#3b6ea5", "#a9c4de"


def main() -> None:
    """Command line."""
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: plot.py results.json [picture.png]")
    source = Path(sys.argv[1])
    picture = Path(sys.argv[2]) if len(sys.argv) == 3 else source.with_suffix(".png")
    try:
        report = json.loads(source.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"plot.py: {source} is not a results file of bench/run.py: {error}")
    draw(report, picture)
    print(picture)


def draw(report: dict[str, Any], picture: Path) -> None:
    """Writes the picture; its format follows from the file name."""
    plots = pyplot()
    figure, (rates, latencies, backlog) = plots.subplots(
        3, 1, figsize=(11, 15), height_ratios=(5, 4, 2), layout="constrained"
    )
    draw_throughput(rates, report)
    draw_latency(latencies, report["summaries"])
    draw_backlog(backlog, report["measurements"])
    environment = report["environment"]
    figure.suptitle(f"{environment['machine']}, {environment['cores']} cores, {environment['started']}")
    figure.savefig(picture, dpi=110)


def pyplot() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        sys.exit("plot.py needs matplotlib, which is not installed: pip install matplotlib")


def draw_throughput(axes: Any, report: dict[str, Any]) -> None:
    shown = [each for each in report["summaries"] if metric(each, "messages_per_s")]
    wanted = {bar["title"]: bar["wanted"] for bar in report["bars"]}
    for row, summary in enumerate(shown):
        spread = summary["metrics"]["messages_per_s"]
        error = [[spread["median"] - spread["lowest"]], [spread["highest"] - spread["median"]]]
        axes.barh(row, spread["median"], xerr=error, color=MEASURED)
        axes.text(spread["median"], row, f" {spread['median']:,.0f}", va="center", fontsize=8)
        bar = wanted.get(f"{summary['title']}, msg/s")
        if bar:
            axes.plot([float(bar.strip("≥ ").replace(",", ""))], [row], marker="|", markersize=18, color=BAR)
    axes.set_title("messages per second (median, lowest to highest; red: the bar), logarithmic")
    label_rows(axes, shown)


def draw_latency(axes: Any, summaries: Summaries) -> None:
    shown = [each for each in summaries if metric(each, "p50_ms")]
    for row, summary in enumerate(shown):
        p50, p99 = metric(summary, "p50_ms"), metric(summary, "p99_ms")
        if p99:
            axes.barh(row, p99, color=TAIL)
        axes.barh(row, p50, color=MEDIAN)
        label = f" {p50:.2f} / {p99:.2f}" if p99 else f" {p50:.2f}"
        axes.text(max(p50, p99), row, label, va="center", fontsize=8)
    axes.set_title("milliseconds (p50 dark, p99 light), logarithmic")
    label_rows(axes, shown)


def draw_backlog(axes: Any, measurements: Summaries) -> None:
    axes.set_title("mixed: messages pushed but not yet acknowledged, over the seconds")
    for measurement in measurements:
        if measurement["series"]:
            axes.plot([second["backlog"] for second in measurement["series"]], color=MEASURED)
    axes.set_ylim(bottom=0)


def metric(summary: dict[str, Any], name: str) -> float:
    return float(summary["metrics"].get(name, {}).get("median", 0.0))


def label_rows(axes: Any, shown: Summaries) -> None:
    axes.set_yticks(range(len(shown)), [summary["title"] for summary in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.12)


if __name__ == "__main__":
    main()
