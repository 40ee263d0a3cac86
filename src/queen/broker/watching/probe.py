"""How a worker is just now: its process, its connections, what waits in it."""

from __future__ import annotations

import time

import psutil

from queen.broker.broker import Broker
from queen.metrics.tally import WorkerTally


class Probe:
    """Looks at one worker. Counters that its parts keep themselves are taken over into the tally."""

    def __init__(self, broker: Broker) -> None:
        self._brokers = broker.kin or (broker,)
        self._process = psutil.Process()
        self._cpu = self._process.cpu_times()
        self._cpu_at = time.monotonic()
        self._errors = 0
        self._batches = 0

    def gauges(self) -> dict[str, float]:
        """Numbers that go up and down, by the names of their columns. CPU is hundredths of a percent of one core."""
        pools = [broker.database.usage for broker in self._brokers]
        memory = self._process.memory_info()
        user, system = self._cpu_use()
        waiting = sum(
            len(broker.pusher.fusion) + len(broker.acker.fusion) + len(broker.renewer.fusion)
            for broker in self._brokers
        )
        return {
            "free_slots": sum(pool.largest - pool.active for pool in pools),
            "job_queue": waiting,
            "db_connections": sum(pool.size + pool.links for pool in pools),
            "pool_size": sum(pool.size for pool in pools),
            "pool_idle": sum(pool.idle for pool in pools),
            "pool_active": sum(pool.active for pool in pools),
            "cpu_user": user,
            "cpu_system": system,
            "rss_bytes": memory.rss,
            "virtual_bytes": memory.vms,
        }

    def cpu_seconds(self) -> tuple[float, float]:
        """User and system time that the process has used in all."""
        times = self._process.cpu_times()
        return times.user, times.system

    def count(self, total: WorkerTally) -> None:
        """Add what happened since the last look."""
        errors = sum(broker.database.errors for broker in self._brokers)
        batches = sum(
            broker.claimer.batches
            + sum(fusion.batches for fusion in (broker.pusher.fusion, broker.acker.fusion, broker.renewer.fusion))
            for broker in self._brokers
        )
        total.db_errors += errors - self._errors
        total.batches += batches - self._batches
        self._errors, self._batches = errors, batches

    def _cpu_use(self) -> tuple[float, float]:
        times, now = self._process.cpu_times(), time.monotonic()
        elapsed = max(0.001, now - self._cpu_at)
        use = [10_000 * (getattr(times, what) - getattr(self._cpu, what)) / elapsed for what in ("user", "system")]
        self._cpu, self._cpu_at = times, now
        return max(0.0, use[0]), max(0.0, use[1])
