"""How a run is done: read once from the command line."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Options of a run. Times are in seconds, rates in messages per second."""

    only: tuple[str, ...] = ()
    repeat: int = 3
    seconds: float = 10.0
    mixed_seconds: float = 300.0
    mixed_rate: float = 55_000.0
    park_idle_seconds: float = 30.0
    connections: int = 64
    partitions: int = 16
    workers: int = 2
    against: str | None = None
    dsn: str | None = None
    server_pid: int | None = None

    @property
    def warmup(self) -> float:
        return min(1.0, self.seconds / 4)
