"""A PostgreSQL that Queen brings along and runs itself, for those who have none at hand."""

from queen.postgres.embedded import EmbeddedPostgres
from queen.postgres.errors import EmbeddedPostgresError

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError"]
