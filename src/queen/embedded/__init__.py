"""The embedded PostgreSQL, used when no database is configured."""

from queen.embedded.errors import EmbeddedPostgresError
from queen.embedded.postgres import EmbeddedPostgres

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError"]
