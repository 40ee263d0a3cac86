"""What has a name: queues, groups, topics and streaming queries."""
