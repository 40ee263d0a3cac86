"""The exceptions of Queen.

QueenError
├── SettingsError         a setting has a value that cannot be used
├── SchemaTooNew          the database was migrated by a newer Queen than this one
├── UnsupportedPostgres   the PostgreSQL is older than Queen can use
├── DatabaseUnavailable   PostgreSQL cannot be reached; what was in flight may or may not have happened
│   └── DatabaseDown      it was unavailable before: refused at once, nothing was done
├── RedisUnavailable      Redis cannot be reached; PostgreSQL serves alone
├── BadRequest            the request is wrong; nothing was stored
├── Forbidden             the caller is authenticated, but not authorized
├── NotFound              what the request names does not exist
├── Conflict              the request contradicts what is stored
├── Overloaded            the server refuses work it could not finish in time
└── QuotaExceeded         a namespace has used up its share; nothing was stored
"""


class QueenError(Exception):
    """An error that the user can act on; the text says what is wrong, where, and what to do."""


class SettingsError(QueenError):
    """A setting has a value that cannot be used."""


class SchemaTooNew(QueenError):
    """The database was migrated by a newer Queen than this one."""


class UnsupportedPostgres(QueenError):
    """The PostgreSQL is older than Queen can use."""


class DatabaseUnavailable(QueenError):
    """PostgreSQL cannot be reached; a statement in flight may or may not have been applied."""


class DatabaseDown(DatabaseUnavailable):
    """PostgreSQL is known to be unavailable, which has been logged: the statement was not tried."""


class RedisUnavailable(QueenError):
    """Redis cannot be reached; a command in flight may or may not have been applied."""


class BadRequest(QueenError):
    """The request is wrong; nothing was stored. `code` names what of it, for programs, where it has such names."""

    def __init__(self, text: str = "", code: str = "") -> None:
        super().__init__(text)
        self.code = code


class Forbidden(QueenError):
    """The caller is authenticated, but not authorized."""


class NotFound(QueenError):
    """What the request names does not exist; `code` says what, for programs, where it has such names."""

    def __init__(self, text: str = "", code: str = "") -> None:
        super().__init__(text)
        self.code = code


class Conflict(QueenError):
    """The request contradicts what is stored."""


class Overloaded(QueenError):
    """The server is overloaded; retry later."""


class QuotaExceeded(QueenError):
    """A namespace has used up its share; nothing was stored."""

    def __init__(self, text: str, retry_after: int) -> None:
        super().__init__(text)
        self.retry_after = retry_after
