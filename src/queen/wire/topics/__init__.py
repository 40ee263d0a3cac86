"""Topics: requests, items as they are rendered, and records of the log of buffered namespaces."""
