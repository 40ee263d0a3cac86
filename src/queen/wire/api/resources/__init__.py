"""Resources: queues, groups, topics and streaming queries."""
