"""Queen: a message queue, task queue and stream platform on PostgreSQL."""

__version__ = "0.1.0"
