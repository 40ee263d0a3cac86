"""Tables beside messages: dead letters, traces, items of topics, and the lag of groups."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from queen.errors import NotFound, SettingsError
from queen.spark.options import ReadOptions, Table
from queen.spark.schemas import columns_of
from queen.spark.source.connections import ShardConnection
from queen.spark.source.logs import ShardLog
from queen.wire.envelope import Envelope

Row = tuple[Any, ...]


@dataclass
class ShardTask(InputPartition):
    """One shard, which one task reads."""

    shard: int


class TableReader(DataSourceReader):
    """Reads a table from every shard, each in a task of its own."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if options.access.server is not None:
            raise SettingsError(f"table {options.table} is read from PostgreSQL: give databaseUrls instead of server")
        self._options = options
        names = columns_of(options.table).fieldNames()
        unknown = [name for name in schema.fieldNames() if name not in names]
        if unknown:
            raise SettingsError(f"table {options.table} has no {', '.join(unknown)}; it has {', '.join(names)}")
        self._places = tuple(names.index(name) for name in schema.fieldNames())

    def partitions(self) -> list[InputPartition]:
        options = self._options
        log = ShardLog(options.access.database_urls, options.access.outage_grace)
        if options.queues:
            log.check_queues(options.queues)
        shards = range(len(options.access.database_urls))
        if options.topic is not None and not any(
            log.fetch(shard, "known_topic", options.namespace, options.topic) for shard in shards
        ):
            where = f"namespace {options.namespace!r} has" if options.namespace else "there is"
            raise NotFound(f"{where} no topic {options.topic!r}")
        return [ShardTask(shard) for shard in shards]

    def read(self, partition: InputPartition) -> Iterator[Row]:
        assert isinstance(partition, ShardTask)
        access = self._options.access
        log = ShardLog(access.database_urls, access.outage_grace)
        # It waits for PostgreSQL until the first rows come; what ends in the middle is the task's to do again.
        log.fetch(partition.shard, "spark_ping")
        for row in self._rows(log.connection(partition.shard)):
            yield tuple(row[place] for place in self._places)

    def _rows(self, connection: ShardConnection) -> Iterator[Row]:
        options = self._options
        queues = list(options.queues) or None
        match options.table:
            case Table.DLQ:
                rows = connection.stream("dead_letter_rows", queues, options.group)
                return self._opened(rows)
            case Table.TRACES:
                rows = connection.stream("trace_rows", queues, options.group)
                return self._opened(rows)
            case Table.TOPIC:
                return map(_item, connection.stream("topic_item_rows", options.namespace, options.topic))
            case _:
                return _lags(connection, options.queues, options.group)

    def _opened(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Rows whose last column is sealed as segments are."""
        envelope = Envelope(self._options.access.encryption_keys)
        for *columns, body in rows:
            yield (*columns, envelope.open(body).decode())


def _item(row: Row) -> Row:
    *columns, metadata, is_json, payload = row
    text = payload.decode() if is_json else base64.b64encode(payload).decode()
    return (*columns, metadata.decode() if metadata else None, is_json, text)


def _lags(connection: ShardConnection, queues: Sequence[str], group: str | None) -> Iterator[Row]:
    groups = [number for number, name in connection.fetch("all_groups") if group in (None, name)]
    unmet = connection.fetch("unmet_news", groups)
    starts = [ends for *_, ends in unmet]
    if unmet:
        found = connection.fetch(
            "offsets_after",
            [partition for _, _, partition, _, _ in unmet],
            [first for *_, first, _ in unmet],
            [ends for *_, ends in unmet],
            [since for _, since, *_ in unmet],
        )
        for slot, offset in found:
            starts[slot - 1] = offset
    met = [number for number, *_ in unmet], [partition for _, _, partition, _, _ in unmet], starts
    rows = connection.fetch("group_positions", groups, *met, None, None, 0)
    for name, queue, partition, _, _, leased, consumed, consumed_at, behind, oldest, seconds in rows:
        if not queues or queue in queues:
            yield (name, queue, partition, behind, seconds, oldest, leased, consumed, consumed_at)
