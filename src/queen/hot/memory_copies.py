"""Copies of logs in memory, for hosts that live in one process."""

from __future__ import annotations

from collections.abc import Sequence

from queen.hot.interfaces import Copied


class MemoryCopies:
    """Records by where they end, by file."""

    def __init__(self) -> None:
        self._files: dict[str, dict[int, Copied]] = {}

    async def add(self, file_id: str, records: Sequence[Copied]) -> None:
        self._files.setdefault(file_id, {}).update((record.end, record) for record in records)

    async def files(self) -> set[str]:
        return set(self._files)

    async def read(self, file_id: str, since: int, limit: int) -> list[Copied]:
        records = self._files.get(file_id, {})
        return [records[end] for end in sorted(records) if end > since][:limit]

    async def trim(self, file_id: str, upto: int) -> None:
        left = {end: record for end, record in self._files.get(file_id, {}).items() if end > upto}
        if left:
            self._files[file_id] = left
        else:
            self._files.pop(file_id, None)
