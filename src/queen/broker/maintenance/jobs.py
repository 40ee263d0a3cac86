"""The background jobs of the queues, and their runner on the elected worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from queen.broker.change_log import KEPT_SECONDS
from queen.broker.events import EventKind
from queen.broker.maintenance.cleanup import (
    DroppedPartitions,
    ExpiredKeys,
    OldMetrics,
    OldRows,
    PartitionSweep,
    Publish,
    UnusedGroups,
)
from queen.broker.maintenance.election import Election, Job, Session
from queen.broker.maintenance.retention import Eviction, Retention, Trimmer
from queen.broker.maintenance.rewrite import Rewrite
from queen.broker.maintenance.schedule import PushListener
from queen.broker.notifications import Handlers
from queen.concurrency import BackgroundTask
from queen.errors import DatabaseUnavailable
from queen.settings import Settings
from queen.storage.database import BUSY_ERRORS, AdvisoryLock, Database

log = logging.getLogger(__name__)

_DROPPED_INTERVAL = 60.0
_KEYS_INTERVAL = 30.0
_REWRITE_INTERVAL = 5.0
_CHANGES_INTERVAL = 60.0
_HISTORY_DAYS = 90
SEEKS_KEPT_SECONDS = 86_400.0
_STAGED_SECONDS = 86_400.0
_STAGE_RUNS_INTERVAL = 3600.0
# For how long a subscription waits for its queue to be made.
_UNMET_SECONDS = 86_400.0
_IDLE_EPHEMERAL = 3600.0
# A streaming query that rests for longer may publish its last batch again.
_STAGE_RUNS_SECONDS = 400 * 86_400.0
_BETWEEN_PIECES = 0.05
_BETWEEN_TERMS = 1.0


def cleaning_jobs(settings: Settings, publish: Publish, push_listener: PushListener) -> list[Job]:
    """The jobs that keep the tables of the queues small; `publish` notifies the workers of what is gone.

    What they remember of partitions comes from reading them, and from the pushes that `push_listener` is notified of.
    """
    retention_seconds = settings.retention_interval / 1000
    batch = settings.retention_batch_size
    jobs = [
        Job("retention", retention_seconds, Retention(Trimmer(batch, push_listener)).run),
        Job(
            "eviction",
            settings.eviction_interval / 1000,
            Eviction(Trimmer(settings.eviction_batch_size, push_listener)).run,
        ),
        Job("partition sweep", retention_seconds, PartitionSweep(batch, settings.partition_cleanup_days, publish).run),
        Job("expired keys", _KEYS_INTERVAL, ExpiredKeys(batch).run),
        Job("old history", retention_seconds, OldRows("remove_old_history", _HISTORY_DAYS, batch).run),
        Job(
            "old audit",
            retention_seconds,
            OldRows("remove_old_audit", settings.audit_retention_days * 86_400, batch).run,
        ),
        Job("old changes", _CHANGES_INTERVAL, OldRows("remove_old_changes", KEPT_SECONDS, batch).run),
        Job("old stages", retention_seconds, OldRows("remove_old_stages", _STAGED_SECONDS, batch).run),
        Job("old stage runs", _STAGE_RUNS_INTERVAL, OldRows("remove_old_stage_runs", _STAGE_RUNS_SECONDS, batch).run),
        Job("unused groups", retention_seconds, UnusedGroups(batch, publish).run),
        Job("idle ephemeral queues", retention_seconds, OldRows("ephemeral_collect", _IDLE_EPHEMERAL, batch).run),
        Job("old subscriptions", retention_seconds, OldRows("remove_old_subscriptions", _UNMET_SECONDS, batch).run),
        Job("old seeks", retention_seconds, OldRows("remove_old_seeks", SEEKS_KEPT_SECONDS, batch).run),
        Job("old metrics", retention_seconds, OldMetrics(batch, settings.metrics_retention_days).run),
        # After the job that drops partitions, so that one round of all jobs leaves nothing behind.
        Job("dropped partitions", _DROPPED_INTERVAL, DroppedPartitions(batch).run, prompt=True),
    ]
    if settings.rewrite_hot_tables:
        jobs.append(Job("rewrite", _REWRITE_INTERVAL, Rewrite().run))
    return jobs


class JobRunner:
    """Stands for election as long as it runs, and does the jobs while elected."""

    def __init__(self, database: Database, make_jobs: Callable[[PushListener], Sequence[Job]]) -> None:
        """Jobs are made for each term: what those of an earlier one remember may be long out of date."""
        self._database = database
        self._election = Election(database, AdvisoryLock.BACKGROUND_JOBS)
        self._make_jobs = make_jobs
        self._wake_ups: dict[Job, asyncio.Event] = {}
        self.push_listener = PushListener()
        self._background = BackgroundTask()
        self.elected = asyncio.Event()

    def start(self) -> None:
        self._background.start(self._serve())

    async def stop(self) -> None:
        """Cancel what is under way, and let another worker be elected."""
        await self._background.stop()

    def handlers(self) -> Handlers:
        """What notifications change about the jobs of this worker, if it is the elected one."""
        return {
            EventKind.PUSHED: lambda event: self.push_listener.pushed(event[1], event[2]),
            EventKind.QUEUE_GONE: lambda event: self.trigger(),
        }

    def trigger(self) -> None:
        """Something was deleted: have the prompt jobs run now, if this worker is the elected one."""
        for job, wake_up in self._wake_ups.items():
            if job.prompt:
                wake_up.set()

    async def run_once(self) -> None:
        """Do all that is due now, elected or not: every step is safe beside another runner's.

        The jobs remember nothing, so they look everywhere.
        """
        session = await Session.open(self._database)
        try:
            for job in self._make_jobs(PushListener()):
                while await job.run(session):
                    pass
        finally:
            await session.close()

    async def _serve(self) -> None:
        while True:
            session = await self._election.win()
            log.info("elected: this worker runs the background jobs")
            self.elected.set()
            try:
                await self._run_jobs(session)
            finally:
                self.elected.clear()
                await session.close()
            log.warning("connection with the lock of the background jobs was lost; another worker takes over")
            await asyncio.sleep(_BETWEEN_TERMS)

    async def _run_jobs(self, session: Session) -> None:
        """Run the jobs side by side until the lock is lost."""
        loop = asyncio.get_running_loop()
        lost = loop.create_task(session.lost.wait())
        self.push_listener = PushListener()
        self._wake_ups = {job: asyncio.Event() for job in self._make_jobs(self.push_listener)}
        jobs = [loop.create_task(self._repeat(job, wake_up, session)) for job, wake_up in self._wake_ups.items()]
        jobs.append(loop.create_task(session.keep_alive()))
        try:
            await asyncio.wait([lost, *jobs], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.push_listener = PushListener()
            self._wake_ups = {}
            for task in (lost, *jobs):
                task.cancel()
            await asyncio.gather(lost, *jobs, return_exceptions=True)

    async def _repeat(self, job: Job, wake_up: asyncio.Event, session: Session) -> None:
        while True:
            wake_up.clear()
            try:
                more = await job.run(session)
            except DatabaseUnavailable:
                raise
            except BUSY_ERRORS as error:
                log.warning("background job %r could not run (%s); its next run tries again", job.name, error)
                more = False
            except Exception:
                # A job that fails must not take the others with it.
                log.exception("background job %r failed; its next run tries again", job.name)
                more = False
            if more:
                await asyncio.sleep(_BETWEEN_PIECES)
                continue
            try:
                async with asyncio.timeout(job.interval):
                    await wake_up.wait()
            except TimeoutError:
                pass
