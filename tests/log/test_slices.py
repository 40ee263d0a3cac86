"""Parts of pushes: what is let go of when they are packed can be had again."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import pytest

from queen.log.catalog import Partition, Queue
from queen.log.slices import PushSlice, SlicePreparer, split_by_target
from queen.wire.envelope import Envelope
from queen.wire.ids import IdSource
from queen.wire.push import PushItem


@dataclass
class Sender:
    subject: str | None = "somebody"
    blocks: frozenset[bytes] = frozenset()


QUEUE = Queue(
    id=1,
    public_id=uuid.uuid4(),
    name="q",
    namespace="",
    task="",
    priority=0,
    lease_time=300,
    retry_limit=3,
    retry_delay=1000,
    max_size=0,
    ttl=None,
    dead_letter_queue=False,
    dlq_after_max_retries=False,
    delayed_processing=0,
    window_buffer=0,
    retention_seconds=0,
    completed_retention_seconds=0,
    retention_enabled=False,
    encryption_enabled=False,
    max_wait_time_seconds=0,
    dedup_window_seconds=None,
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
)


def items(count: int, size: int = 10, *, traced: bool = True) -> list[PushItem]:
    return [
        PushItem(
            "q",
            "p",
            msgspec.Raw(b'"%b"' % (b"x" * size)),
            f'transaction {number} \u00e9"',
            str(uuid.uuid4()) if traced and number % 2 else "",
        )
        for number in range(count)
    ]


def packed(sent: list[PushItem]) -> PushSlice:
    (part,) = split_by_target(Sender(), sent)
    return prepared(part, 7)


def prepared(part: PushSlice, partition_id: int) -> PushSlice:
    SlicePreparer(Envelope(), IdSource()).prepare(part, Partition(partition_id, 1, "q", "p"), QUEUE)
    return part


def plain(sent: list[PushItem]) -> list[tuple[str, str, bytes, str, str]]:
    return [(item.queue, item.partition, bytes(item.payload), item.transaction_id, item.trace_id) for item in sent]


@pytest.mark.parametrize(("count", "size"), [(50, 10), (3, 20_000), (3000, 300)])
def test_a_large_slice_drops_its_items_and_unpacks_them_on_demand(count: int, size: int) -> None:
    sent = items(count, size)
    part = packed(sent)
    assert (part.given, part.count, part.traced) == (None, count, True)
    assert plain(part.items) == plain(sent)
    assert part.count == count


def test_a_small_part_keeps_its_items() -> None:
    sent = items(2)
    part = packed(sent)
    assert part.given is sent and part.chunks is None


def test_a_part_knows_when_none_of_its_items_is_traced() -> None:
    assert not packed(items(60, traced=False)).traced


def test_a_part_that_was_packed_can_be_packed_for_another_partition() -> None:
    sent = items(60)
    part = packed(sent)
    before = part.hashes
    again = prepared(part, 8)
    assert again.hashes != before and plain(again.items) == plain(sent)
