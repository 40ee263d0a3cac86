"""Status, history and metrics."""
