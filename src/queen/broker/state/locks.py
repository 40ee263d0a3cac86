"""Locks and semaphores: permits that expire, each a key whose version is the token of its holder."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec
from msgspec import Raw

from queen.broker.state.key_values import KeyValues
from queen.metrics.meter import Meter
from queen.storage.database import Database, Fetcher, retry_transaction
from queen.wire.ids import IdSource
from queen.wire.state.kv import KvDelete, KvGet, KvGetPrefix, KvPut, KvResult, KvRow
from queen.wire.state.locks import (
    MOST_PERMITS,
    NAMESPACE,
    Acquire,
    Guard,
    HeldLock,
    Holder,
    LockAnswer,
    LockList,
    LockOperation,
    LockResult,
    Release,
    Renew,
)
from queen.wire.times import iso_micros

_LOCKS: Final = 0x5175_4C4B
"""The class of the advisory locks that serialize requests for a free permit."""


class _Permit(msgspec.Struct, rename="camel"):
    """What the key of a permit holds."""

    owner: str
    since: str


_permit: Final = msgspec.json.Decoder(_Permit)


class Locks:
    """The locks of one shard."""

    def __init__(self, database: Database, key_values: KeyValues, ids: IdSource, meter: Meter) -> None:
        self._database = database
        self._meter = meter
        self._key_values = key_values
        self._ids = ids

    async def run(self, operations: Sequence[LockOperation]) -> LockAnswer:
        """Do operations one after the other, each by itself."""
        return LockAnswer([await self._retried(index, one) for index, one in enumerate(operations)])

    async def page(self, prefix: str, limit: int, offset: int) -> LockList:
        """A page of the permits that are held, of locks whose names begin with a text."""
        found = await self._key_values.page(NAMESPACE, prefix, limit, offset)
        return LockList(list(filter(None, map(_held, found.keys))), found.total, found.exact, found.pagination)

    async def _retried(self, index: int, operation: LockOperation) -> LockResult:
        kind = type(operation).__name__.lower()
        try:
            result = await retry_transaction(lambda: self._run(index, operation))
        except Exception:
            self._meter.count("lock", kind, "error")
            raise
        self._meter.count("lock", kind, result.reason or "ok")
        return result

    async def _run(self, index: int, operation: LockOperation) -> LockResult:
        result = LockResult(index, operation.name)
        await self._key_values.prepare([KvGet(NAMESPACE, operation.name)])
        async with self._database.transaction() as transaction:
            if isinstance(operation, Acquire):
                await self._acquire(transaction, operation, result)
            elif isinstance(operation, Renew):
                await self._renew(transaction, operation, result)
            elif isinstance(operation, Release):
                key = _key(operation.name, operation.slot)
                (done,) = await self._key_values.run_in(transaction, [KvDelete(NAMESPACE, key, operation.token)])
                result.released = bool(done.applied)
                if not done.applied:
                    result.reason = "lost"
            else:
                result.holders = await self._holders(transaction, operation.name)
                result.held = bool(result.holders)
        return result

    async def _acquire(self, fetcher: Fetcher, asked: Acquire, result: LockResult) -> None:
        await fetcher.fetch("kv_lock", _LOCKS, [NAMESPACE], [asked.name], [False])
        owner = asked.owner or self._ids.uuid()
        holders = await self._holders(fetcher, asked.name)
        own = next((one for one in holders if one.owner == owner), None)
        if own is not None:
            result.acquired = result.already = True
            _hold(result, own.slot, own.token, owner, own.expires_at)
            return
        taken = {one.slot for one in holders}
        free = next((slot for slot in range(asked.limit) if slot not in taken), None)
        # Requests for a permit of this lock are serialized, so no other takes a free one.
        if free is None:
            result.acquired, result.reason, result.holders = False, "held", holders
            return
        value = _Permit(owner, iso_micros(datetime.now(UTC)))
        stored = await self._write(fetcher, _key(asked.name, free), value, asked.ttl_seconds)
        result.acquired = True
        _hold(result, free, _version(stored), owner, _expiry(stored))

    async def _renew(self, fetcher: Fetcher, asked: Renew, result: LockResult) -> None:
        key = _key(asked.name, asked.slot)
        # It is locked before it is read, as a check locks it.
        await self._key_values.run_in(fetcher, [KvDelete(NAMESPACE, key, _NEVER)])
        (found,) = await self._key_values.run_in(fetcher, [KvGet(NAMESPACE, key)])
        permit = _permit.decode(found.value) if isinstance(found.value, Raw) else None
        is_own = permit is not None and (
            permit.owner == asked.owner if asked.owner is not None else found.version == asked.token
        )
        if permit is None or not is_own:
            result.renewed, result.reason = False, "lost"
            result.holders = await self._holders(fetcher, asked.name)
            return
        stored = await self._write(fetcher, key, permit, asked.ttl_seconds)
        result.renewed = True
        _hold(result, asked.slot, _version(stored), permit.owner, _expiry(stored))

    async def _write(self, fetcher: Fetcher, key: str, permit: _Permit, seconds: int) -> KvResult:
        put = KvPut(NAMESPACE, key, Raw(msgspec.json.encode(permit)), ttl_seconds=seconds)
        (stored,) = await self._key_values.run_in(fetcher, [put])
        return stored

    async def _holders(self, fetcher: Fetcher, name: str) -> list[Holder]:
        """The holders of permits, by slot."""
        prefix = KvGetPrefix(NAMESPACE, f"{name}#", limit=MOST_PERMITS)
        holders: list[Holder] = []
        while True:
            (page,) = await self._key_values.run_in(fetcher, [prefix])
            assert isinstance(page.rows, list)
            holders += map(_holder, page.rows)
            if not page.truncated:
                return sorted(holders, key=lambda one: one.slot)
            prefix.after = page.rows[-1].key


_NEVER: Final = (1 << 63) - 1
"""A version that no key has."""


def _key(name: str, slot: int) -> str:
    return f"{name}#{slot}"


def _holder(row: KvRow) -> Holder:
    permit = _permit.decode(row.value if isinstance(row.value, Raw) else b"")
    slot = int(row.key.rpartition("#")[2])
    return Holder(slot, permit.owner, row.version, permit.since, row.expires_at, row.updated_at)


def _held(row: KvRow) -> HeldLock | None:
    """A permit with the name of its lock; None for a key of the namespace that is none."""
    name, _, slot = row.key.rpartition("#")
    try:
        permit = _holder(row) if name and slot.isdecimal() else None
    except msgspec.DecodeError:
        permit = None
    return None if permit is None else HeldLock(**msgspec.structs.asdict(permit), name=name)


def _hold(result: LockResult, slot: int, token: int, owner: str, expires_at: str | None) -> None:
    result.slot, result.token, result.owner, result.expires_at = slot, token, owner, expires_at
    result.guard = Guard("check", NAMESPACE, _key(result.name, slot), token, required=True)


def _version(stored: KvResult) -> int:
    assert isinstance(stored.version, int)
    return stored.version


def _expiry(stored: KvResult) -> str | None:
    return stored.expires_at if isinstance(stored.expires_at, str) else None
