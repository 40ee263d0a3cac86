"""Benchmarks of a Queen server: `python bench/run.py --help`."""
