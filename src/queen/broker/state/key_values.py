"""Keys and values: every operation of a request in one transaction, judged in order while its keys are locked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import UNSET, Raw

from queen.broker.answer_size import Answers, AnswerSize, TooLarge
from queen.errors import NotFound
from queen.log.catalog import Catalog
from queen.metrics.meter import Meter
from queen.storage.database import Database, Fetcher, Record, retry_transaction
from queen.wire.fields import LARGEST_BIGINT, Pagination
from queen.wire.push import DEFAULT_PARTITION
from queen.wire.state.kv import (
    MOST_ON_A_PAGE,
    KvAnswer,
    KvCheck,
    KvDelete,
    KvGet,
    KvGetMany,
    KvGetPrefix,
    KvIncr,
    KvList,
    KvListed,
    KvNamespace,
    KvNamespaces,
    KvOperation,
    KvPut,
    KvPutIfAbsent,
    KvReason,
    KvResult,
    KvRow,
    KvWrite,
    is_number,
    namespaces_of,
)
from queen.wire.state.locks import NAMESPACE
from queen.wire.times import iso_micros

_LOCKS: Final = 0x5175_4B56
"""The class of the advisory locks of keys."""
_MOST_BYTES: Final = 8 << 20
"""The maximum size of the values of one read; the rest is left out, and the answer says so."""

MOST_COUNTED: Final = 100_000
"""Of what a list would hold."""
_MOST_COUNTED_EACH: Final = 1000
"""Keys of each namespace in a list."""
_MOST_LISTED_BYTES: Final = 1024
"""Of a value in a list."""

_Key: TypeAlias = tuple[str, str]
"""Namespace and key."""

_NULL: Final = Raw(b"null")
_any: Final = msgspec.json.Decoder()


@dataclass(slots=True)
class _Stored:
    """A key that exists."""

    value: str | None
    """None: it was left out, because the answer would have become too large with it."""
    version: int
    expires_at: datetime | None
    updated_at: datetime

    @property
    def raw(self) -> Raw:
        """The value as JSON. Raises `TooLarge` where it was left out."""
        if self.value is None:
            raise TooLarge("the values of these keys are too large for one answer: ask for fewer in a request")
        return Raw(self.value.encode())


class PreconditionLost(Exception):
    """An operation that is required was not applied; nothing was done."""

    def __init__(self, result: KvResult) -> None:
        super().__init__(f"the precondition of key {result.key!r} does not hold ({result.reason})")
        self.result = result


class KeyValues:
    """The keys and values of one shard."""

    def __init__(self, database: Database, catalog: Catalog, meter: Meter, *, sharded: bool, answers: Answers) -> None:
        """`sharded`: there are other shards, to which the queue of a namespace may move."""
        self._answers = answers
        self._database = database
        self._meter = meter
        self._catalog = catalog
        self._sharded = sharded

    async def run(self, operations: Sequence[KvOperation]) -> KvAnswer:
        """Do operations in order, all or nothing."""
        try:
            results = await self._answers.make(
                lambda new_size: retry_transaction(lambda: self._run(operations, new_size()))
            )
        except PreconditionLost as lost:
            failed = lost.result
            results = [
                KvResult(index, applied=False, reason="rolledBack") if index != failed.index else failed
                for index in range(len(operations))
            ]
            self.count(operations, results)
            return KvAnswer(False, results, "kv_precondition", failed.index)
        except Exception:
            self.count(operations, None)
            raise
        self.count(operations, results)
        return KvAnswer(True, results)

    async def namespaces(self, search: str, limit: int, offset: int) -> KvNamespaces:
        """A page of the namespaces that have keys, without that of locks."""
        rows = await self._database.fetch("kv_namespaces", search, NAMESPACE, limit, offset, _MOST_COUNTED_EACH)
        first = rows or await self._database.fetch("kv_namespaces", search, NAMESPACE, 1, 0, 1)
        listed = [KvNamespace(row["namespace"], row["keys"]) for row in rows]
        return KvNamespaces(listed, first[0]["total"] if first else 0, Pagination(limit, offset))

    async def page(self, namespace: str, prefix: str, limit: int, offset: int) -> KvList:
        """A page of the keys of a namespace that begin with a text."""
        await self._find(namespace)
        rows = await self._database.fetch("kv_page", namespace, prefix, limit, offset, _MOST_LISTED_BYTES)
        (count,) = await self._database.fetch("kv_count", namespace, prefix, MOST_COUNTED)
        keys = [
            KvListed(
                row["key"],
                row["version"],
                _time(row["expires_at"]),
                iso_micros(row["updated_at"]),
                UNSET if row["value"] is None else Raw(row["value"].encode()),
                bytes=row["bytes"],
            )
            for row in rows
        ]
        return KvList(keys, count["found"], count["found"] < MOST_COUNTED, Pagination(limit, offset))

    async def entry(self, namespace: str, key: str) -> KvRow:
        """A key with its value. Raises `NotFound` where there is none."""
        await self._find(namespace)
        (row,) = await self._database.fetch("kv_load", [namespace], [key], [False], self._answers.most_bytes)
        if row["version"] is None:
            raise NotFound(f"key {key!r} of namespace {namespace!r} does not exist")
        stored = _stored(row)
        times = (_time(stored.expires_at), iso_micros(stored.updated_at))
        return KvRow(key, stored.version, *times, stored.raw)

    def count(self, operations: Sequence[KvOperation], results: Sequence[KvResult] | None) -> None:
        """Operations were done, or failed with an error (None)."""
        for place, operation in enumerate(operations):
            outcome = "error" if results is None else (results[place].reason or "ok")
            self._meter.count("kv", str(operation.__struct_config__.tag), str(outcome))

    async def prepare(self, operations: Sequence[KvOperation]) -> None:
        """Before a transaction: where there are several shards, a namespace has its queue, by which it is found."""
        if self._sharded and operations:
            await self._catalog.ensure_partitions({(ns, DEFAULT_PARTITION) for ns in namespaces_of(operations)})

    async def run_in(
        self, fetcher: Fetcher, operations: Sequence[KvOperation], first: int = 0, size: AnswerSize | None = None
    ) -> list[KvResult]:
        """Do operations in a transaction; results are numbered from `first` on.

        Raises `PreconditionLost`, and `TooLarge` where their values are larger than an answer, or `size`, may be.
        """
        if not operations:
            return []
        if self._sharded:
            await self._hold(fetcher, namespaces_of(operations))
        locked = [one for one in operations if not isinstance(one, KvGet | KvGetMany | KvGetPrefix)]
        if locked:
            await fetcher.fetch(
                "kv_lock",
                _LOCKS,
                [one.ns for one in locked],
                [one.key for one in locked],
                [isinstance(one, KvCheck) for one in locked],
            )
        batch = _Batch(fetcher, size or AnswerSize(self._answers.most_bytes))
        await batch.load(operations)
        results: list[KvResult] = []
        for index, operation in enumerate(operations, first):
            result = await batch.run(index, operation)
            if getattr(operation, "required", False) and not result.applied:
                raise PreconditionLost(result)
            results.append(result)
        await batch.flush()
        return results

    async def _run(self, operations: Sequence[KvOperation], size: AnswerSize) -> list[KvResult]:
        await self.prepare(operations)
        async with self._database.transaction() as transaction:
            return await self.run_in(transaction, operations, size=size)

    async def _find(self, namespace: str) -> None:
        """Raises `NotFound` where the namespace has moved to another shard."""
        if self._sharded and await self._catalog.queue(namespace) is not None:
            await self._hold(self._database, [namespace])

    async def _hold(self, fetcher: Fetcher, namespaces: Collection[str]) -> None:
        gone = await hold_queues(fetcher, self._catalog, namespaces)
        if gone:
            raise NotFound(f"the queue of namespace {gone[0]!r} is not on this shard")


async def hold_queues(fetcher: Fetcher, catalog: Catalog, names: Collection[str]) -> list[str]:
    """Keep queues on this shard until the transaction ends; those that are not on it, by name, are forgotten."""
    rows = await fetcher.fetch("kv_hold_queues", list(names))
    gone = sorted(set(names) - {row["name"] for row in rows})
    for name in gone:
        catalog.forget_queue(name)
    return gone


class _Batch:
    """The operations of one transaction, and the keys as they leave them."""

    def __init__(self, fetcher: Fetcher, size: AnswerSize) -> None:
        self._fetcher = fetcher
        self._size = size
        self._keys: dict[_Key, _Stored | None] = {}
        self._changed: set[_Key] = set()
        self._versions: list[int] = []
        self._now = datetime.min

    async def load(self, operations: Sequence[KvOperation]) -> None:
        """Read all keys that are named, and draw versions for those that may be written."""
        named: list[tuple[_Key, bool]] = []
        for one in operations:
            if isinstance(one, KvGetMany):
                named += [((one.ns, key), False) for key in one.keys]
            elif not isinstance(one, KvGetPrefix):
                named.append(((one.ns, one.key), isinstance(one, KvPut | KvPutIfAbsent | KvIncr)))
        if not named:
            return
        rows = await self._fetcher.fetch(
            "kv_load",
            [key[0] for key, _ in named],
            [key[1] for key, _ in named],
            [written for _, written in named],
            self._size.most,
        )
        self._now = rows[0]["now"]
        for (key, _), row in zip(named, rows, strict=True):
            self._keys[key] = _stored(row) if row["version"] is not None else None
        # In descending order, to be taken from the end.
        self._versions = sorted((row["drawn"] for row in rows if row["drawn"] is not None), reverse=True)

    async def run(self, index: int, operation: KvOperation) -> KvResult:
        """Do one operation. Raises `TooLarge` where its result is one too many for an answer."""
        if isinstance(operation, KvGetPrefix):
            await self.flush()
            return await self._prefix(index, operation)
        if isinstance(operation, KvGetMany):
            return self._many(index, operation)
        result = self._one(index, operation)
        if isinstance(result.value, Raw):
            self._size.add(memoryview(result.value).nbytes)
        return result

    def _one(self, index: int, operation: KvGet | KvWrite | KvCheck) -> KvResult:
        key = (operation.ns, operation.key)
        stored = self._keys[key]
        if isinstance(operation, KvGet):
            return _found(index, operation.key, stored)
        if isinstance(operation, KvIncr):
            return self._incr(index, operation, stored)
        expect = 0 if isinstance(operation, KvPutIfAbsent) else operation.expect
        reason = _conflict(stored, expect) if expect is not UNSET else None
        if reason is None and isinstance(operation, KvDelete) and stored is None:
            reason = "absent"
        if reason is not None:
            return _verdict(index, operation.key, stored, reason)
        if isinstance(operation, KvDelete):
            stored = self._keys[key] = None
            self._changed.add(key)
        elif not isinstance(operation, KvCheck):
            stored = self._write(key, bytes(operation.value).decode(), self._expiry(operation))
        return _verdict(index, operation.key, stored)

    async def flush(self) -> None:
        """Write what was changed."""
        written = [(key, stored) for key in self._changed if (stored := self._keys[key]) is not None]
        removed = [key for key in self._changed if self._keys[key] is None]
        self._changed.clear()
        if written:
            await self._fetcher.fetch(
                "kv_store",
                [key[0] for key, _ in written],
                [key[1] for key, _ in written],
                [stored.value for _, stored in written],
                [stored.version for _, stored in written],
                [stored.expires_at for _, stored in written],
                [stored.updated_at for _, stored in written],
            )
        if removed:
            await self._fetcher.fetch("kv_remove", [key[0] for key in removed], [key[1] for key in removed])

    def _incr(self, index: int, operation: KvIncr, stored: _Stored | None) -> KvResult:
        value: Any = _any.decode(stored.raw) if stored is not None else 0
        if not is_number(value):
            return _verdict(index, operation.key, stored, "type")
        value += operation.delta
        low, high = operation.min, operation.max
        if abs(value) > LARGEST_BIGINT or (low is not None and value < low) or (high is not None and value > high):
            return _verdict(index, operation.key, stored, "limit")
        expires_at = stored.expires_at if stored is not None else self._expiry(operation)
        key = (operation.ns, operation.key)
        return _verdict(index, operation.key, self._write(key, msgspec.json.encode(value).decode(), expires_at))

    def _write(self, key: _Key, value: str, expires_at: datetime | None) -> _Stored:
        stored = self._keys[key] = _Stored(value, self._versions.pop(), expires_at, self._now)
        self._changed.add(key)
        return stored

    def _expiry(self, operation: KvPut | KvPutIfAbsent | KvIncr) -> datetime | None:
        seconds = operation.ttl_seconds
        return None if seconds is UNSET else self._now + timedelta(seconds=seconds)

    def _many(self, index: int, operation: KvGetMany) -> KvResult:
        keys = dict.fromkeys(operation.keys)
        found = [(key, stored) for key in keys if (stored := self._keys[operation.ns, key]) is not None]
        rows = self._fitting(found)
        missing = [key for key in keys if self._keys[operation.ns, key] is None]
        return KvResult(index, rows=rows, missing=missing, truncated=len(rows) < len(found))

    async def _prefix(self, index: int, operation: KvGetPrefix) -> KvResult:
        limit = min(max(1, operation.limit), MOST_ON_A_PAGE)
        found = await self._fetcher.fetch(
            "kv_prefix", operation.ns, operation.prefix, operation.after, limit + 1, self._size.most
        )
        rows = self._fitting([(row["key"], _stored(row)) for row in found[:limit]], values=not operation.keys_only)
        truncated = len(rows) < len(found)
        return KvResult(index, rows=rows, truncated=truncated, next_after=rows[-1].key if truncated else None)

    def _fitting(self, found: Sequence[tuple[str, _Stored]], *, values: bool = True) -> list[KvRow]:
        """As many rows as there is room for. Raises `TooLarge` where there is none for the first."""
        rows: list[KvRow] = []
        room = _MOST_BYTES
        for key, stored in found:
            row = KvRow(key, stored.version, _time(stored.expires_at), iso_micros(stored.updated_at))
            if values:
                nbytes = len(stored.value.encode()) if stored.value is not None else None
                if rows and (room <= 0 or not self._size.fits(nbytes)):
                    break
                if not rows:
                    self._size.add(nbytes)
                row.value = stored.raw
                room -= nbytes or 0
            rows.append(row)
        return rows


def _stored(row: Record) -> _Stored:
    return _Stored(row["value"], row["version"], row["expires_at"], row["updated_at"])


def _conflict(stored: _Stored | None, expect: int) -> KvReason | None:
    """Why a key is not as it was expected to be; None if it is."""
    if expect == 0:
        return "exists" if stored is not None else None
    if stored is None:
        return "absent"
    return "version" if stored.version != expect else None


def _verdict(index: int, key: str, stored: _Stored | None, reason: KvReason | None = None) -> KvResult:
    """The result of a write or check, with the key as it is now."""
    result = KvResult(index, key, applied=reason is None, value=_NULL, version=0)
    if reason is not None:
        result.reason = reason
    if stored is not None:
        result.value, result.version = stored.raw, stored.version
        result.expires_at = _time(stored.expires_at)
    return result


def _found(index: int, key: str, stored: _Stored | None) -> KvResult:
    if stored is None:
        return KvResult(index, key, found=False)
    return KvResult(
        index,
        key,
        found=True,
        value=stored.raw,
        version=stored.version,
        expires_at=_time(stored.expires_at),
        updated_at=iso_micros(stored.updated_at),
    )


def _time(moment: datetime | None) -> str | None:
    return iso_micros(moment) if moment is not None else None
