"""Reading without consuming: messages, groups, queues, traces, logs by offset."""
