"""What is kept at hand beside PostgreSQL: in Redis when it is configured, else in the memory of this worker."""
