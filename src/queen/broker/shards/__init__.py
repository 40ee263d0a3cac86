"""Several PostgreSQL instances: what lives where, and how it gets elsewhere."""
