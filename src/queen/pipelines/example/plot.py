"""The plot at the end of the example."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet

from queen.pipelines.manifest import Manifest


def plot_scores(root: Path, target: Path, title: str) -> int:
    """Draw the score of each company over time; returns how many windows there are."""
    rows = [row for path in _files(root) for row in pyarrow.parquet.read_table(path, partitioning=None).to_pylist()]
    import matplotlib

    # No window is opened: the picture is a file.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for company in sorted({row["company"] for row in rows}):
        points = sorted((row["window_start"], row["score"]) for row in rows if row["company"] == company)
        axes.plot([moment for moment, _ in points], [score for _, score in points], marker="o", label=company)
    axes.set(title=title, xlabel="window of five minutes (UTC)", ylabel="score")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.autofmt_xdate()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return len(rows)


def _files(root: Path) -> Sequence[Path]:
    with Manifest(root).reading() as snapshot:
        return [root / file.path for file in snapshot.files]
