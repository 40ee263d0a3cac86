"""`queen import --from <PostgreSQL of a Queen 0.15>`: its queues, messages, groups, dead letters and traces.

Messages keep their order, ids, transaction ids and times. Each transaction notes in the target how far it has come, so
an import that was interrupted goes on there, and one that is repeated takes over what has come since: the old server
may run meanwhile. What was stored by a transaction that is still open there is left for the next run.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
import typer

from queen.cli.common.databases import DatabaseUrl, DataDir, connected, open_databases
from queen.cli.common.exits import ServerFailed, UserError
from queen.cli.common.output import Column, Output, Progress
from queen.cli.common.tree import command, group

app = group("Import the data of a Queen 0.15.")

_TABLES: Final = {
    "queues",
    "partitions",
    "messages",
    "partition_consumers",
    "consumer_groups_metadata",
    "dead_letter_queue",
    "message_traces",
    "message_trace_names",
}
_NO_ID: Final = uuid.UUID(int=0)
_BATCH: Final = 2000
_NONCE_BYTES: Final = 12
_LOW_BITS: Final = 48
"""Ids of one segment differ in these alone."""
_COLUMNS = (
    Column("QUEUE", "queue"),
    Column("PARTITIONS", "partitions", right=True),
    Column("MESSAGES", "messages", right=True),
    Column("NEW", "new", right=True),
    Column("GROUPS", "groups", right=True),
    Column("DEAD", "deadLetters", right=True),
    Column("TRACES", "traces", right=True),
    Column("VERIFIED", "verified"),
)


@command(
    app,
    "import",
    example="""
queen import --from postgresql://postgres:secret@old-host/queen
queen import --from postgresql://old-host/queen --database-url postgresql://new-host/queen --verify
""",
)
def import_(
    source: Annotated[str, typer.Option("--from", help="The database of the Queen 0.15, as a URL.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    queue: Annotated[list[str] | None, typer.Option("--queue", help="Only this queue; may be repeated.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare counts and hashes of both sides afterwards.")
    ] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, max=50_000, help="Messages of one transaction.")] = _BATCH,
    output: Annotated[str | None, typer.Option("-o", "--output", help="table, json, yaml …")] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print only errors.")] = False,
) -> None:
    """Import the data of a Queen 0.15: queues, options, messages, groups, dead letters and traces.

    Order, ids, transaction ids and times of messages stay. The old server may run meanwhile: run it
    once, stop the old producers and consumers, run it again for the rest, and start the new server.
    Payloads that 0.15 encrypted need its key in QUEEN_ENCRYPTION_KEY. Exit code 2 when --verify finds
    a difference.
    """
    out = Output(output, quiet=quiet)
    with open_databases(database_url, data_dir, create=True) as databases:
        if len(databases.dsns) != 1:
            raise UserError("import into one database, and spread queues over shards afterwards: queen shards move")
        keys = [bytes.fromhex(key) for key in databases.settings.queen_encryption_key]
        rows = asyncio.run(_import(source, databases.dsns[0], keys, out, set(queue or []), batch, verify))
    out.rows(rows, _COLUMNS)
    wrong = [row["queue"] for row in rows if row["verified"] is False]
    if wrong:
        raise ServerFailed(f"both sides differ on {', '.join(wrong)}; delete these queues here, and import them again")


async def _import(
    source_dsn: str, target_dsn: str, keys: Sequence[bytes], out: Output, chosen: set[str], batch: int, verify: bool
) -> list[dict[str, Any]]:
    from queen.storage.migrate import migrate

    source = await connected(source_dsn, server_settings={"default_transaction_read_only": "on"})
    try:
        await migrate(target_dsn)
        target = await connected(target_dsn)
        try:
            importer = Importer(source, target, keys, batch)
            await importer.prepare(chosen)
            with out.progress("importing", importer.total) as bar:
                rows = [await importer.take_over(name, bar) for name in importer.queues]
            if verify:
                with out.progress("verifying", importer.total) as bar:
                    for row in rows:
                        row["verified"] = await importer.verify(row["queue"], bar)
            return rows
        finally:
            await target.close()
    finally:
        await source.close()


class Importer:
    """Moves what one database holds to another."""

    def __init__(self, source: Any, target: Any, keys: Sequence[bytes], batch: int = _BATCH) -> None:
        from queen.storage.statements import load_statements
        from queen.wire.envelope import Envelope

        self._source = source
        self._target = target
        self._sql = load_statements()
        self._keys = keys
        self._envelope = Envelope(keys)
        self._batch = batch
        self._groups: dict[str, int] = {}
        self._partitions: dict[str, list[Any]] = {}
        self._encrypted: dict[str, bool] = {}
        self._positions: dict[uuid.UUID, list[Any]] = {}
        self._subscribed: set[tuple[str, str]] = set()
        self.queues: list[str] = []
        self.total = 0

    async def prepare(self, chosen: set[str]) -> None:
        """Look at the source, and make its queues and partitions here."""
        found = {row["name"] for row in await self._source.fetch(self._sql["legacy_tables"])}
        columns = {row["column_name"] for row in await self._source.fetch(self._sql["legacy_message_columns"])}
        if not found >= _TABLES or "producer_sub" not in columns or "segments" in found:
            raise UserError("the database of --from is not that of a Queen 0.15: its tables differ")
        await self._target.execute(self._sql["import_prepare"])
        queues = await self._source.fetch(self._sql["legacy_queues"])
        unknown = chosen - {row["name"] for row in queues}
        if unknown:
            raise UserError(f"the Queen 0.15 has no queue {', '.join(sorted(unknown))}")
        for row in queues:
            if not chosen or row["name"] in chosen:
                self.queues.append(row["name"])
                await self._target.execute(self._sql["import_queue"], *_queue_values(row))
        stored = await self._target.fetch(self._sql["import_encrypted"], self.queues)
        self._encrypted = {row["name"]: row["encryption_enabled"] and self._envelope.can_encrypt for row in stored}
        for row in await self._source.fetch(self._sql["legacy_partitions"]):
            if row["queue"] in self.queues:
                self._partitions.setdefault(row["queue"], []).append(row)
                self.total += row["messages"]
        for row in await self._source.fetch(self._sql["legacy_positions"]):
            self._positions.setdefault(row["partition_id"], []).append(row)
        await self._take_subscriptions()

    async def take_over(self, queue: str, bar: Progress) -> dict[str, Any]:
        """Everything of a queue that is not here yet."""
        row: dict[str, Any] = {
            "queue": queue,
            "partitions": 0,
            "messages": 0,
            "new": 0,
            "groups": 0,
            "deadLetters": 0,
            "traces": 0,
        }
        groups: set[str] = set()
        horizon = await self._source.fetchval(self._sql["legacy_horizon"])
        for partition in self._partitions.get(queue, []):
            place = await self._target.fetchrow(
                self._sql["import_partition"], partition["id"], queue, partition["name"], partition["created_at"]
            )
            new = await self._take_messages(queue, partition["id"], place, horizon, bar)
            groups |= await self._take_positions(queue, partition["id"], place["partition_id"])
            row["partitions"] += 1
            row["new"] += new
            row["messages"] += place["messages"] + new
            row["deadLetters"] += await self._take_dead_letters(queue, partition["id"], place)
            row["traces"] += await self._take_traces(queue, partition["id"], place)
        return {**row, "groups": len(groups), "verified": None}

    async def verify(self, queue: str, bar: Progress) -> bool:
        """Whether all messages of a queue are here that were taken over, as the other side has them.

        Those that it has removed since, as its retention does, have nothing to be compared with.
        """
        progress = {row["source_id"]: row for row in await self._target.fetch(self._sql["import_progress"])}
        for partition in self._partitions.get(queue, []):
            place = progress[partition["id"]]
            there, here, stored = _Digest(), _Digest(), 0
            messages = self._stored_messages(place["partition_id"], place["messages"])
            async for message in self._old_messages(partition["id"], _EARLIEST, _NO_ID, None):
                if (message["created_at"], message["id"]) > (place["last_created_at"], place["last_id"]):
                    break
                there.add(message["id"], message["transaction_id"], message["created_at"], self._payload(message))
                async for one in messages:
                    stored += 1
                    if one[0] == message["id"]:
                        here.add(*one)
                        break
                bar.advance()
            stored += len([one async for one in messages])
            if there.value != here.value or stored != place["messages"]:
                return False
        return True

    async def _take_messages(
        self, queue: str, source_id: uuid.UUID, place: Any, horizon: datetime, bar: Progress
    ) -> int:
        taken = 0
        batch: list[Any] = []
        async for message in self._old_messages(source_id, place["last_created_at"], place["last_id"], horizon):
            batch.append(message)
            if len(batch) == self._batch:
                await self._store(queue, source_id, place["partition_id"], batch)
                taken += len(batch)
                bar.advance(len(batch))
                batch = []
        if batch:
            await self._store(queue, source_id, place["partition_id"], batch)
            taken += len(batch)
            bar.advance(len(batch))
        return taken

    async def _old_messages(
        self, source_id: uuid.UUID, after: datetime, after_id: uuid.UUID, horizon: datetime | None
    ) -> AsyncIterator[Any]:
        until = horizon or datetime.max.replace(tzinfo=UTC)
        while rows := await self._source.fetch(
            self._sql["legacy_messages"], source_id, after, after_id, until, self._batch
        ):
            for row in rows:
                yield row
            after, after_id = rows[-1]["created_at"], rows[-1]["id"]

    async def _store(self, queue: str, source_id: uuid.UUID, partition_id: int, messages: Sequence[Any]) -> None:
        """Append messages, and note that they are here: both or neither."""
        async with self._target.transaction():
            end = await self._target.fetchrow(self._sql["import_end"], partition_id)
            if end["last_at"] is not None and end["last_at"] > messages[0]["created_at"]:
                raise UserError(
                    f"queue {queue} has newer messages of its own here, and order could not be kept; delete it, "
                    "or import before producers use the new server"
                )
            segments = [self._segment(run, partition_id, self._encrypted.get(queue, False)) for run in _runs(messages)]
            bases, at = [], end["next_offset"]
            for count, *_ in segments:
                bases.append(at)
                at += count
            counts, times, ids, bodies = ([part[index] for part in segments] for index in range(4))
            await self._target.execute(self._sql["import_segments"], partition_id, bases, counts, times, ids, bodies)
            last = messages[-1]
            await self._target.execute(self._sql["import_advance"], partition_id, at, last["created_at"])
            await self._target.execute(
                self._sql["import_note"], source_id, last["created_at"], last["id"], len(messages)
            )

    def _segment(self, run: Sequence[Any], partition_id: int, encrypt: bool) -> tuple[int, datetime, bytes, bytes]:
        from queen.wire.segment import pack_segment, transaction_hash

        names = [message["transaction_id"] for message in run]
        traces = [message["trace_id"] for message in run]
        producers = [message["producer_sub"] for message in run]
        body = pack_segment(
            [msgspec.json.encode(name) for name in names],
            [self._payload(message) for message in run],
            traces if any(traces) else None,
            producers if any(producers) else None,
        )
        hashes = array("Q", [transaction_hash(name, partition_id) for name in names]).tobytes()
        return (
            len(run),
            run[0]["created_at"],
            run[0]["id"].bytes + hashes,
            self._envelope.seal(body, encrypt=encrypt or any(message["is_encrypted"] for message in run)),
        )

    async def _take_positions(self, queue: str, source_id: uuid.UUID, partition_id: int) -> set[str]:
        groups = set()
        for row in self._positions.get(source_id, []):
            name = row["consumer_group"]
            groups.add(name)
            if row["last_consumed_created_at"] is None and (name, queue) in self._subscribed:
                # It has consumed nothing here: its subscription says where it begins.
                continue
            committed = 0
            if row["last_consumed_created_at"] is not None:
                committed = await self._offset_behind(
                    partition_id, row["last_consumed_created_at"], row["last_consumed_id"]
                )
            await self._target.execute(
                self._sql["import_cursor"],
                partition_id,
                await self._group(name),
                committed,
                row["batch_retry_count"] or 0,
                row["total_messages_consumed"] or 0,
                row["total_batches_consumed"] or 0,
                row["last_consumed_at"],
                row["created_at"],
            )
        return groups

    async def _offset_behind(self, partition_id: int, created_at: datetime, message_id: uuid.UUID) -> int:
        """The first offset behind a position of the old order."""
        last = await self._target.fetchrow(
            self._sql["import_segment_until"], partition_id, created_at, message_id.bytes
        )
        if last is None:
            return 0
        count: int = last["count"]
        if last["created_at"] == created_at:
            count = min(count, message_id.int - int.from_bytes(last["ids"][:16], "big") + 1)
        return int(last["base_offset"] + count)

    async def _take_subscriptions(self) -> None:
        for row in await self._source.fetch(self._sql["legacy_subscriptions"]):
            if row["queue_name"] not in self.queues:
                continue
            if not row["partition_name"]:
                self._subscribed.add((row["consumer_group"], row["queue_name"]))
            await self._target.execute(
                self._sql["import_subscription"],
                await self._group(row["consumer_group"]),
                row["queue_name"],
                row["partition_name"],
                row["subscription_mode"],
                row["subscription_timestamp"],
                row["created_at"],
            )

    async def _take_dead_letters(self, queue: str, source_id: uuid.UUID, place: Any) -> int:
        rows = await self._source.fetch(self._sql["legacy_dead_letters"], source_id)
        offsets = await self._offsets(place["partition_id"], [(row["id"], row["created_at"]) for row in rows])
        count = 0
        for row in rows:
            offset = offsets.get(row["id"])
            if offset is None:
                continue
            encrypt = self._encrypted.get(queue, False) or row["is_encrypted"]
            await self._target.execute(
                self._sql["import_dead_letter"],
                place["queue_id"],
                place["partition_id"],
                offset,
                await self._group(row["consumer_group"] or "__QUEUE_MODE__"),
                row["id"],
                row["transaction_id"],
                row["trace_id"],
                row["producer_sub"],
                self._envelope.seal(self._payload(row), encrypt=encrypt),
                row["error_message"] or "",
                row["retry_count"] or 0,
                row["original_created_at"] or row["created_at"],
                row["failed_at"],
            )
            count += 1
        return count

    async def _take_traces(self, queue: str, source_id: uuid.UUID, place: Any) -> int:
        rows = await self._source.fetch(self._sql["legacy_traces"], source_id)
        wanted = [(row["message_id"], row["message_created_at"]) for row in rows]
        offsets = await self._offsets(place["partition_id"], wanted)
        count = 0
        for row in rows:
            offset = offsets.get(row["message_id"])
            if offset is None:
                continue
            await self._target.execute(
                self._sql["import_trace"],
                row["id"],
                place["queue_id"],
                place["partition_id"],
                offset,
                row["transaction_id"],
                row["consumer_group"] or "__QUEUE_MODE__",
                row["event_type"] or "info",
                self._envelope.seal(row["data"].encode(), encrypt=self._encrypted.get(queue, False)),
                row["worker_id"] or "",
                row["created_at"],
                row["names"],
            )
            count += 1
        return count

    async def _offsets(self, partition_id: int, wanted: Sequence[tuple[uuid.UUID, datetime]]) -> dict[uuid.UUID, int]:
        """Where messages are in a partition, with one statement however many there are."""
        if not wanted:
            return {}
        times = list({created_at for _, created_at in wanted})
        offsets: dict[uuid.UUID, int] = {}
        for row in await self._target.fetch(self._sql["import_places"], partition_id, times):
            first = int.from_bytes(row["ids"][:16], "big")
            offsets.update({uuid.UUID(int=first + index): row["base_offset"] + index for index in range(row["count"])})
        return offsets

    async def _stored_messages(
        self, partition_id: int, most: int
    ) -> AsyncIterator[tuple[uuid.UUID, str, datetime, bytes]]:
        """The first messages of a partition here, as a digest takes them."""
        from queen.wire.ids import IdBlock
        from queen.wire.segment import Segment

        at = count = 0
        while count < most:
            rows = await self._target.fetch(self._sql["import_stored"], partition_id, at, self._batch)
            if not rows:
                return
            for row in rows:
                block = IdBlock.parse(row["ids"][:16])
                segment = Segment(row["base_offset"], row["created_at"], block, self._envelope.open(row["body"]))
                names = segment.transaction_ids()
                for index in range(min(segment.count, most - count)):
                    if not segment.is_deleted(index):
                        count += 1
                        message_id = uuid.UUID(segment.block.text(index))
                        yield message_id, names[index], row["created_at"], segment.payload(index)
                at = row["base_offset"] + row["count"]

    async def _group(self, name: str) -> int:
        if name not in self._groups:
            self._groups[name] = await self._target.fetchval(self._sql["import_group"], name)
        return self._groups[name]

    def _payload(self, message: Mapping[str, Any]) -> bytes:
        """The payload in clear, whatever it was stored as."""
        text: str = message["payload"] if message["payload"] is not None else "null"
        return self._decrypt(text) if message["is_encrypted"] else text.encode()

    def _decrypt(self, text: str) -> bytes:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        stored = msgspec.json.decode(text)
        sealed = base64.b64decode(stored["encrypted"]) + base64.b64decode(stored["authTag"])
        nonce = base64.b64decode(stored["iv"])[:_NONCE_BYTES]
        for key in self._keys:
            try:
                return AESGCM(key).decrypt(nonce, sealed, None)
            except InvalidTag:
                continue
        raise UserError("some payloads are encrypted by a key that is not in QUEEN_ENCRYPTION_KEY; add it")


class _Digest:
    """A hash over messages in order."""

    def __init__(self) -> None:
        import xxhash

        self._hash = xxhash.xxh3_128()
        self.count = 0

    def add(self, message_id: uuid.UUID, transaction_id: str, created_at: datetime, payload: bytes) -> None:
        self.count += 1
        head = f"{message_id} {created_at.timestamp():.6f} {len(payload)} {transaction_id}\n"
        self._hash.update(head.encode() + payload)

    @property
    def value(self) -> tuple[int, bytes]:
        return self.count, self._hash.digest()


_EARLIEST: Final = datetime(1, 1, 1, tzinfo=UTC)


def _runs(messages: Sequence[Any]) -> list[list[Any]]:
    """Messages that can share a segment: stored at the same time, with ids that follow each other."""
    runs: list[list[Any]] = []
    for message in messages:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and message["created_at"] == last["created_at"]
            and message["id"].int == last["id"].int + 1
            and message["id"].int >> _LOW_BITS == last["id"].int >> _LOW_BITS
            and message["is_encrypted"] == last["is_encrypted"]
        ):
            runs[-1].append(message)
        else:
            runs.append([message])
    return runs


def _queue_values(row: Mapping[str, Any]) -> list[Any]:
    """The options of a queue in the order of `import_queue`. Versions of 0.15 stored a ttl that had no effect."""
    return [
        row["name"],
        row["namespace"] or "",
        row["task"] or "",
        max(0, row["priority"] or 0),
        row["lease_time"] if row["lease_time"] is not None else 300,
        row["retry_limit"] if row["retry_limit"] is not None else 3,
        row["retry_delay"] if row["retry_delay"] is not None else 1000,
        row["max_queue_size"] or 0,
        None,
        bool(row["dead_letter_queue"]),
        bool(row["dlq_after_max_retries"]),
        row["delayed_processing"] or 0,
        row["window_buffer"] or 0,
        row["retention_seconds"] or 0,
        row["completed_retention_seconds"] or 0,
        bool(row["retention_enabled"]),
        bool(row["encryption_enabled"]),
        row["max_wait_time_seconds"] or 0,
        row["created_at"],
    ]
