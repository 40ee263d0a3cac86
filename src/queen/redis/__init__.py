"""Ready queues, keys, counters and log copies in Redis, with in-memory fallbacks; never the only copy."""
