"""Redis: ready queues, keys, counters and log copies, or their in-memory fallbacks; never the only copy."""
