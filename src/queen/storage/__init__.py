"""PostgreSQL: connections, migrations, and every SQL text."""
