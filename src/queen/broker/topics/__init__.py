"""Topics: priority queues with delayed delivery, retries, idempotency and quotas."""
