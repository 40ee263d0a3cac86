"""What a task does: read the segments of its spans, and make record batches of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from queen.errors import Conflict
from queen.spark.columns import record_batches
from queen.spark.log import Log, Span, StoredSegment
from queen.spark.options import Access
from queen.spark.shards import ShardLog
from queen.wire.envelope import Envelope

log = logging.getLogger(__name__)


def open_log(access: Access) -> Log:
    """The way to the messages that the options name."""
    return ShardLog(access.database_urls)


@dataclass(frozen=True, slots=True)
class MessageReading:
    """How messages are read: it travels to the workers with each task."""

    access: Access
    wanted: tuple[str, ...]
    fail_on_data_loss: bool

    def read(self, spans: Sequence[Span]) -> Iterator[pa.RecordBatch]:
        segments = self._complete(open_log(self.access).segments(spans), spans)
        return record_batches(segments, spans, self.wanted, Envelope(self.access.encryption_keys))

    def _complete(self, segments: Iterator[StoredSegment], spans: Sequence[Span]) -> Iterator[StoredSegment]:
        """The segments, while it is checked that none is missing: offsets are dense, until retention removes some."""
        reached = [span.start for span in spans]
        for segment in segments:
            if segment.base_offset > reached[segment.slot]:
                self._lost(spans[segment.slot], reached[segment.slot], segment.base_offset)
            reached[segment.slot] = segment.base_offset + segment.messages
            yield segment
        for span, offset in zip(spans, reached, strict=True):
            if offset < span.end:
                self._lost(span, offset, span.end)

    def _lost(self, span: Span, start: int, end: int) -> None:
        report_loss(f"offsets {start} to {end - 1} of {span.queue}/{span.partition}", fail=self.fail_on_data_loss)


def report_loss(what: str, *, fail: bool) -> None:
    """Messages that were to be read are gone: the query ends, or goes on without them."""
    if fail:
        raise Conflict(
            f"{what} are gone before they were read: retention, a clearing or a deletion has removed them."
            " Set failOnDataLoss to false to go on without them"
        )
    log.warning("%s are gone before they were read; going on without them", what)
