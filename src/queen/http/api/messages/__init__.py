"""Push, pop and ack, and the messages that are stored."""
