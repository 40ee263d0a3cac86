"""A PostgreSQL that Queen brings along and runs itself, for those who have none at hand."""

from queen.embedded.errors import EmbeddedPostgresError
from queen.embedded.postgres import EmbeddedPostgres

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError"]
