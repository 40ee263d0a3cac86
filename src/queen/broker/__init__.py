"""The broker: the semantics of queues, partitions, leases and transactions. Knows nothing of HTTP."""
