"""The answer to a push: what became of each item, in the order in which it was sent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec

from queen.log.append_batch import AppendBatch, ItemOutcome
from queen.log.slices import PushSlice

_encode = msgspec.json.encode


def render_results(batches: Sequence[AppendBatch]) -> dict[PushSlice, list[bytes]]:
    """For each slice the answer to each of its items: JSON objects without their opening `{"index":n`."""
    results: dict[PushSlice, list[bytes]] = {}
    for batch in batches:
        ids = stored_ids(batch)
        lines = _all_stored(batch, ids) if batch.outcomes is None else _each(batch, batch.outcomes, ids)
        if len(batch.slices) == 1:
            results[batch.slices[0]] = lines
            continue
        rest = iter(lines)
        for slice_ in batch.slices:
            results[slice_] = list(islice(rest, slice_.count))
    return results


def stored_ids(batch: AppendBatch) -> list[bytes]:
    """The message ids of what was stored, in order."""
    ids: list[bytes] = []
    for chunk in batch.chunks:
        prefix, low = chunk.block.prefix, chunk.block.low
        ids += [b"%b%012x" % (prefix, low + i) for i in range(chunk.count)]
    return ids


def join_results(
    slices: Sequence[PushSlice], results: dict[PushSlice, list[bytes]], count: int, first: int = 0
) -> bytes:
    """The whole answer of a request, or of the part of one that begins with its item `first`."""
    if len(slices) == 1:
        lines = results[slices[0]]
        if count == 1:
            return b'[{"index":%d%b]' % (first, lines[0])
    else:
        lines = [b""] * count
        for slice_ in slices:
            for position, line in zip(slice_.positions or (), results[slice_], strict=True):
                lines[position] = line
    return b"[" + b",".join([b'{"index":%d%b' % numbered for numbered in enumerate(lines, first)]) + b"]"


def _all_stored(batch: AppendBatch, ids: list[bytes]) -> list[bytes]:
    tail = b'","partition_id":"%b","trace_id":' % batch.partition.uuid.encode()
    end = b',"queueName":%b}' % _encode(batch.queue.name)
    plain = tail + b"null" + end
    lines: list[bytes] = []
    at = 0
    for slice_ in batch.slices:
        own = ids[at : at + slice_.count]
        at += slice_.count
        if not slice_.traced:
            lines += [
                b',"transaction_id":%b,"status":"queued","message_id":"%b%b' % (transaction, id, plain)
                for transaction, id in zip(slice_.transactions, own, strict=True)
            ]
            continue
        lines += [
            b',"transaction_id":%b,"status":"queued","message_id":"%b%b' % (transaction, id, plain)
            if not item.trace_id
            else b',"transaction_id":%b,"status":"queued","message_id":"%b%b%b%b'
            % (transaction, id, tail, _encode(item.trace_id), end)
            for item, transaction, id in zip(slice_.items, slice_.transactions, own, strict=True)
        ]
    return lines


def _each(batch: AppendBatch, outcomes: Sequence[ItemOutcome], ids: list[bytes]) -> list[bytes]:
    name = _encode(batch.queue.name)
    fresh = iter(ids)
    originals = {transaction_id: id.encode() for transaction_id, id in batch.originals.items()}
    lines = []
    for item, outcome in zip(batch.items(), outcomes, strict=True):
        transaction = _encode(item.transaction_id)
        if outcome is ItemOutcome.STORED:
            originals[item.transaction_id] = next(fresh)
        if outcome in (ItemOutcome.STORED, ItemOutcome.STORED_BEFORE):
            lines.append(
                b',"transaction_id":%b,"status":"queued","message_id":"%b","partition_id":"%b","trace_id":%b,"queueName":%b}'
                % (
                    transaction,
                    originals[item.transaction_id],
                    batch.partition.uuid.encode(),
                    _encode(item.trace_id or None),
                    name,
                )
            )
        elif outcome is ItemOutcome.DUPLICATE:
            lines.append(
                b',"transaction_id":%b,"status":"duplicate","message_id":"%b","queueName":%b}'
                % (transaction, originals[item.transaction_id], name)
            )
        else:
            lines.append(
                b',"transaction_id":%b,"status":"failed","error":%b,"queueName":%b}'
                % (transaction, _encode(batch.refusal), name)
            )
    return lines
