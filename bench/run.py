"""Runs the benchmarks: `python bench/run.py --help`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Started as a file, Python looks beside this file and not in the project: the package is one level up.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from bench.command import app

    app()
