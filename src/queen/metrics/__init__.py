"""Counters of a worker, and the reports by which the workers of a host share them."""
