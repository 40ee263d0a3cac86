"""What queues, partitions, leases and transactions mean. Knows nothing of HTTP."""
