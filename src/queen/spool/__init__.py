"""The spool: a durable log on the disk of a host, and the drainer that stores it in PostgreSQL."""
