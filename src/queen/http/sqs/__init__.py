"""Amazon's SQS: its two protocols, on topics (standard queues) and queues (FIFO queues)."""
