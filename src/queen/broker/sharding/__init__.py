"""Sharding over several PostgreSQL databases: finding the shard of a name, and moving names."""
