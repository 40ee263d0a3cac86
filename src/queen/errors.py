"""Every error Queen raises on purpose.

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
    """Something went wrong that its reader can act on; the text says what, where and what to do."""


class SettingsError(QueenError):
    """A setting has a value that cannot be used."""


class SchemaTooNew(QueenError):
    """The database was migrated by a newer Queen than this one."""


class UnsupportedPostgres(QueenError):
    """The PostgreSQL is older than Queen can use."""


class DatabaseUnavailable(QueenError):
    """PostgreSQL cannot be reached; what was in flight may or may not have happened."""


class DatabaseDown(DatabaseUnavailable):
    """PostgreSQL was unavailable before, which has been logged: refused at once, nothing was done."""


class RedisUnavailable(QueenError):
    """Redis cannot be reached; what was in flight may or may not have happened."""


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
    """The server refuses work it could not finish in time."""


class QuotaExceeded(QueenError):
    """A namespace has used up its share; nothing was stored."""

    def __init__(self, text: str, retry_after: int) -> None:
        super().__init__(text)
        self.retry_after = retry_after
