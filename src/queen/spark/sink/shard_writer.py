"""Staging and publishing straight in PostgreSQL, with what servers append and publish with."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, Final, TypeVar

import asyncpg

from queen.errors import DatabaseUnavailable, SettingsError
from queen.log.dedup_filter import DedupFilter
from queen.log.stage_moves import StageLost
from queen.log.stager import Stager
from queen.log.stages import TOPIC_ITEMS, Attempt, Published, Stages
from queen.log.topic_store import TopicPublisher
from queen.storage.database import Connection, Database, Record
from queen.storage.shard_setup import ELSEWHERE
from queen.wire.envelope import Envelope
from queen.wire.ids import IdSource
from queen.wire.push import PushItem

_PAUSE_SECONDS: Final = 0.5
# A batch is published by few statements, however large it is.
_STATEMENT_MS: Final = 600_000
_LOCK_MS: Final = 60_000
_DEDUP_MEMORY: Final = 256 << 20

T = TypeVar("T")


class _WaitingDatabase(Database):
    """Repeats a statement while PostgreSQL is unavailable. Outside of transactions all statements here allow that."""

    outage_grace = 0.0

    async def _open_connection(self, *args: Any, **kwargs: Any) -> Connection:
        # One that is refused is no outage: what was given to connect with is wrong.
        return await asyncpg.connect(*args, **kwargs)

    async def fetch(self, name: str, *args: Any) -> list[Record]:
        deadline = time.monotonic() + self.outage_grace
        while True:
            try:
                return await super().fetch(name, *args)
            except DatabaseUnavailable:
                if time.monotonic() + _PAUSE_SECONDS > deadline:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)


class Shard:
    """One PostgreSQL to write to. Its connections belong to the process and the thread that made it."""

    def __init__(
        self, dsn: str, *, encryption_keys: Sequence[bytes] = (), dedup_window: float, outage_grace: float = 0.0
    ) -> None:
        """`outage_grace`: for how many seconds it waits for a PostgreSQL that is unavailable."""
        self._loop = asyncio.new_event_loop()
        self._grace = outage_grace
        self._database = _WaitingDatabase(
            dsn,
            pool_size=2,
            connect_timeout=5.0,
            statement_timeout_ms=_STATEMENT_MS,
            lock_timeout_ms=_LOCK_MS,
            application_name="queen spark",
        )
        self._database.outage_grace = outage_grace
        self.stages = Stages(
            self._database,
            Envelope(encryption_keys),
            IdSource(),
            TopicPublisher(self._database),
            # Servers read of it in the change log.
            lambda appended: None,
            dedup_window=dedup_window,
            dedup_filter=DedupFilter(_DEDUP_MEMORY),
        )

    def stager(self, run: str, batch: int, attempt: uuid.UUID) -> ShardStager:
        return ShardStager(self, Stager(self.stages, run, batch, attempt))

    def publish(self, run: str, batch: int, attempts: Sequence[Attempt]) -> Published:
        """Publish a batch; while PostgreSQL is unavailable, again: it is published once in any case."""
        deadline = time.monotonic() + self._grace
        while True:
            try:
                return self.run(self.stages.publish(run, batch, attempts))
            except DatabaseUnavailable:
                if time.monotonic() + _PAUSE_SECONDS > deadline:
                    raise
            except asyncpg.PostgresError as error:
                if error.sqlstate != ELSEWHERE:
                    raise
                raise StageLost(f"{error} after the batch was staged; nothing was published, write it again") from error
            time.sleep(_PAUSE_SECONDS)

    def staged_queues(self, run: str, batch: int, attempts: Sequence[Attempt]) -> set[str]:
        """The queues for which some attempts staged messages."""
        rows = self.run(self._database.fetch("stage_targets", run, batch, [attempt.id for attempt in attempts]))
        return {row["queue"] for row in rows if row["partition_id"] != TOPIC_ITEMS}

    def queues_here(self, queues: Collection[str]) -> set[str]:
        """Which of some queues live on this shard."""
        return {row["name"] for row in self.run(self._database.fetch("known_queues", list(queues)))}

    def layout(self) -> list[int]:
        """The shards that take new names, if this is one of several."""
        return [shard for row in self.run(self._database.fetch("shard_state")) for shard in row["layout"]]

    def has_topic(self, topic: tuple[str, str]) -> bool:
        return bool(self.run(self._database.fetch("topics_by_names", [topic[0]], [topic[1]])))

    def abandon(self, run: str, batch: int) -> None:
        self.run(self.stages.abandon(run, batch))

    def close(self) -> None:
        self.run(self._database.close())
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._loop.run_until_complete(work)
        except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
            raise SettingsError(f"PostgreSQL refuses the connection: {error}. Check databaseUrls") from error
        except (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError, asyncpg.InvalidSchemaNameError) as error:
            raise SettingsError(
                f"PostgreSQL has no tables of this version of Queen: {error}. Check databaseUrls, or start a server"
                " of this version on it"
            ) from error
        except asyncpg.InsufficientPrivilegeError as error:
            raise SettingsError(f"PostgreSQL refuses to write: {error}. Check the role in databaseUrls") from error


class ShardStager:
    """Stages what one attempt of a task writes to one shard."""

    def __init__(self, shard: Shard, stager: Stager) -> None:
        self._shard = shard
        self._stager = stager

    def add(self, items: Sequence[PushItem]) -> None:
        self._shard.run(self._stager.add(items))

    def add_topic_items(self, array: bytes, count: int) -> None:
        self._shard.run(self._stager.add_topic_items(array, count))

    def finish(self) -> Attempt:
        return self._shard.run(self._stager.finish())
