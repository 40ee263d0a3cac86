"""Push: slices of requests, deduplication, group commit, and the spool when PostgreSQL is unavailable."""
