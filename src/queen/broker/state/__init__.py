"""State beside the messages: keys and values, locks, timers, ephemeral queues."""
