"""Streaming queries: registering them, and reading the state they keep."""

from __future__ import annotations

import msgspec

from queen.broker.answer_size import Answers, AnswerSize
from queen.errors import BadRequest, Conflict
from queen.log.catalog import Catalog
from queen.storage.database import Database, Record, can_be_stored
from queen.wire.api.resources.streams import (
    RegisteredStream,
    Registration,
    StateQuery,
    StateRow,
    StreamPartition,
    StreamQuery,
    StreamState,
)
from queen.wire.envelope import Envelope, EnvelopeError
from queen.wire.ids import is_uuid, parse_partition_uuid, partition_uuid
from queen.wire.times import iso_millis

MOST_ROWS = 100_000
_MOST_OPEN_PARTITIONS = 1000
_MOST_KNOWN = 10_000
_LAST_CHARACTER = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


class HashMismatch(Conflict):
    """The query is registered with other operators, whose state these cannot take over."""

    def __init__(self, registration: Registration, query_id: str) -> None:
        super().__init__(
            f"config_hash mismatch: operator chain changed for queryId '{registration.name}'."
            " Register it with reset to drop the state of the old chain, or under another name to keep both."
        )
        self.query_id = query_id


class StreamQueries:
    """The queries of one shard."""

    def __init__(self, database: Database, catalog: Catalog, envelope: Envelope, answers: Answers) -> None:
        self._answers = answers
        self._database = database
        self._catalog = catalog
        self._envelope = envelope
        # A query keeps its ids as long as it is registered; of one that was deleted nothing can be written.
        self._ids: dict[str, int] = {}

    async def register(self, registration: Registration) -> RegisteredStream:
        """Register the query, or find it. Raises `HashMismatch` when its operators have changed."""
        values = (registration.source_queue, registration.sink_queue, registration.config_hash)
        async with self._database.transaction() as transaction:
            added = await transaction.fetch("add_stream_query", registration.name, *values)
            reset = False
            if added:
                (query,) = added
            else:
                (query,) = await transaction.fetch("lock_stream_query", registration.name)
                if query["config_hash"] != registration.config_hash:
                    if not registration.reset:
                        raise HashMismatch(registration, query["public_id"])
                    await transaction.fetch("wipe_stream_state", query["id"])
                    reset = True
                await transaction.fetch("update_stream_query", query["id"], *values)
            partitions = await transaction.fetch("stream_partitions", query["id"], _MOST_OPEN_PARTITIONS)
        return RegisteredStream(
            True,
            query["public_id"],
            registration.name,
            registration.config_hash,
            bool(added),
            reset,
            [StreamPartition(partition_uuid(row["id"]), row["name"]) for row in partitions],
        )

    async def delete(self, name: str) -> int | None:
        """Forget a query and its state, when the cycles under way have ended; rows of state, None: no such query."""
        async with self._database.transaction() as transaction:
            found = await transaction.fetch("lock_stream_query", name)
            if not found:
                return None
            ((rows,),) = await transaction.fetch("wipe_stream_state", found[0]["id"])
            await transaction.fetch("delete_stream_query", found[0]["id"])
        self._ids.pop(found[0]["public_id"], None)
        return int(rows)

    async def registered(self) -> list[StreamQuery]:
        """The queries, by name."""
        return [
            StreamQuery(
                query_id=row["public_id"],
                name=row["name"],
                source_queue=row["source_queue"],
                sink_queue=row["sink_queue"],
                config_hash=row["config_hash"],
                created_at=iso_millis(row["created_at"]),
                updated_at=iso_millis(row["updated_at"]),
            )
            for row in await self._database.fetch("stream_queries")
        ]

    async def internal_id(self, query_id: str) -> int | None:
        """The id in the database of a registered query."""
        if not is_uuid(query_id):
            return None
        known = self._ids.get(query_id)
        if known is None:
            rows = await self._database.fetch("stream_query", query_id)
            if not rows:
                return None
            if len(self._ids) >= _MOST_KNOWN:
                self._ids.clear()
            known = self._ids[query_id] = rows[0]["id"]
        return known

    async def state(self, asked: StateQuery) -> StreamState:
        """The rows that are asked for, by key; with a limit, `more` says whether it, or their size, cut them off.

        Raises `TooLarge` where they are too large without one.
        """
        return await self._answers.make(lambda new_size: self._state(asked, new_size()))

    async def _state(self, asked: StateQuery, size: AnswerSize) -> StreamState:
        for value, name in ((asked.query_id, "query_id"), (asked.partition_id, "partition_id")):
            if not is_uuid(value):
                raise BadRequest(f"{name} must be a UUID")
        query = await self.internal_id(asked.query_id)
        partition = parse_partition_uuid(asked.partition_id)
        if query is None or partition is None:
            return StreamState(True, [])
        limit = min(asked.limit or MOST_ROWS, MOST_ROWS)
        if not all(can_be_stored(text) for text in (asked.key_prefix or "", asked.after or "")):
            return StreamState(True, [])
        rows = await self._database.fetch(
            "stream_state",
            query,
            partition,
            [key for key in asked.keys if can_be_stored(key)] if asked.keys is not None else None,
            asked.key_prefix,
            after_prefix(asked.key_prefix) if asked.key_prefix is not None else None,
            asked.ripe_at_or_before,
            asked.after,
            limit + 1,
            size.most,
        )
        if asked.limit is None and len(rows) > limit:
            raise BadRequest(
                f"the state of this query on this partition has more than {limit} rows:"
                " ask for keys or a key_prefix, or for pages with limit and after"
            )
        found: list[StateRow] = []
        for row in rows[:limit]:
            opened = self._value(row)
            if opened is None or not size.fits(len(opened)):
                if asked.limit is None:
                    raise size.exceeded
                break
            found.append(StateRow(row["key"], msgspec.Raw(opened), row["updated_at"].isoformat(), row["version"]))
        more = len(rows) > len(found) if asked.limit is not None else msgspec.UNSET
        return StreamState(True, found, more)

    def _value(self, row: Record) -> bytes | None:
        """What a row holds; None where that was left out."""
        if row["value"] is None:
            return None
        try:
            return self._envelope.open(row["value"])
        except EnvelopeError as error:
            raise Conflict(f"the state of key {row['key']!r} cannot be read: {error}") from error


def after_prefix(prefix: str) -> str | None:
    """The first text, in the order of code points, after all that begin with the prefix; None when none is."""
    for length in range(len(prefix), 0, -1):
        last = ord(prefix[length - 1])
        if last == _LAST_CHARACTER:
            continue
        following = last + 1 if last + 1 not in _SURROGATES else _SURROGATES.stop
        return prefix[: length - 1] + chr(following)
    return None
