"""The answer to a push: what became of each item, in the order in which it was sent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec

from queen.broker.push.append_batch import AppendBatch, ItemOutcome
from queen.broker.push.slices import PushSlice

_encode = msgspec.json.encode


def render_results(lots: Sequence[AppendBatch]) -> dict[PushSlice, list[bytes]]:
    """For each part the answer to each of its items: JSON objects without their opening `{"index":n`."""
    results: dict[PushSlice, list[bytes]] = {}
    for lot in lots:
        ids = stored_ids(lot)
        lines = _all_stored(lot, ids) if lot.fates is None else _each(lot, lot.fates, ids)
        if len(lot.parts) == 1:
            results[lot.parts[0]] = lines
            continue
        rest = iter(lines)
        for part in lot.parts:
            results[part] = list(islice(rest, part.count))
    return results


def stored_ids(lot: AppendBatch) -> list[bytes]:
    """The message ids of what was stored, in order."""
    ids: list[bytes] = []
    for chunk in lot.chunks:
        prefix, low = chunk.block.prefix, chunk.block.low
        ids += [b"%b%012x" % (prefix, low + i) for i in range(chunk.count)]
    return ids


def join_results(parts: Sequence[PushSlice], results: dict[PushSlice, list[bytes]], count: int) -> bytes:
    """The whole answer of a request."""
    if len(parts) == 1:
        lines = results[parts[0]]
        if count == 1:
            return b'[{"index":0%b]' % lines[0]
    else:
        lines = [b""] * count
        for part in parts:
            for position, line in zip(part.positions or (), results[part], strict=True):
                lines[position] = line
    return b"[" + b",".join([b'{"index":%d%b' % numbered for numbered in enumerate(lines)]) + b"]"


def _all_stored(lot: AppendBatch, ids: list[bytes]) -> list[bytes]:
    tail = b'","partition_id":"%b","trace_id":' % lot.partition.uuid.encode()
    end = b',"queueName":%b}' % _encode(lot.queue.name)
    plain = tail + b"null" + end
    lines: list[bytes] = []
    at = 0
    for part in lot.parts:
        own = ids[at : at + part.count]
        at += part.count
        if not part.traced:
            lines += [
                b',"transaction_id":%b,"status":"queued","message_id":"%b%b' % (transaction, id, plain)
                for transaction, id in zip(part.transactions, own, strict=True)
            ]
            continue
        lines += [
            b',"transaction_id":%b,"status":"queued","message_id":"%b%b' % (transaction, id, plain)
            if not item.trace_id
            else b',"transaction_id":%b,"status":"queued","message_id":"%b%b%b%b'
            % (transaction, id, tail, _encode(item.trace_id), end)
            for item, transaction, id in zip(part.items, part.transactions, own, strict=True)
        ]
    return lines


def _each(lot: AppendBatch, fates: Sequence[ItemOutcome], ids: list[bytes]) -> list[bytes]:
    name = _encode(lot.queue.name)
    fresh = iter(ids)
    winners = {transaction_id: id.encode() for transaction_id, id in lot.winners.items()}
    lines = []
    for item, fate in zip(lot.items(), fates, strict=True):
        transaction = _encode(item.transaction_id)
        if fate is ItemOutcome.STORED:
            winners[item.transaction_id] = next(fresh)
        if fate in (ItemOutcome.STORED, ItemOutcome.STORED_BEFORE):
            lines.append(
                b',"transaction_id":%b,"status":"queued","message_id":"%b","partition_id":"%b","trace_id":%b,"queueName":%b}'
                % (
                    transaction,
                    winners[item.transaction_id],
                    lot.partition.uuid.encode(),
                    _encode(item.trace_id or None),
                    name,
                )
            )
        elif fate is ItemOutcome.DUPLICATE:
            lines.append(
                b',"transaction_id":%b,"status":"duplicate","message_id":"%b","queueName":%b}'
                % (transaction, winners[item.transaction_id], name)
            )
        else:
            lines.append(
                b',"transaction_id":%b,"status":"failed","error":%b,"queueName":%b}'
                % (transaction, _encode(refusal(lot)), name)
            )
    return lines


def refusal(lot: AppendBatch) -> str:
    """Why items of a lot did not fit."""
    limit = lot.queue.max_size
    return (
        f"Queue '{lot.queue.name}' would exceed max capacity ({limit})."
        f" Current: {limit - (lot.room or 0)}, Batch: {lot.size}"
    )
