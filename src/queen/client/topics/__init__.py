"""Topics: `queen.topic(namespace, name)`, with priorities, delays, retries and schedules."""
