"""Status, history and Prometheus metrics: what was counted, by worker, queue and minute."""
