"""Background jobs of the elected worker: retention, eviction, cleanup."""
