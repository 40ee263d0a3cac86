"""Where the queues are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, repr=False)
class Connection:
    """The server, and the databases behind it, which Spark reads directly."""

    server: str
    token: str | None = None
    databases: tuple[str, ...] = ()

    def options(self) -> dict[str, str]:
        """For Spark's data source, which reads from the databases where they are known, else through the server."""
        if self.databases:
            return {"databaseUrls": ",".join(self.databases)}
        return {"server": self.server} | ({"token": self.token} if self.token else {})
