"""Built-in jobs: archive, compact, replay, reconcile, rollup, dlq-report."""
