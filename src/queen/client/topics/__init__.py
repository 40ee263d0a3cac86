"""Topics: priorities, delays, retries and schedules. `queen.topic(namespace, name)` begins a sentence."""
