"""Several PostgreSQL instances: which one holds a name, and moving names between them."""
