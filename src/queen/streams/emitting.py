"""What comes out of a stream: through the operators after the reducer, to the sink or to the user's function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from queen.streams.chain import Chain
from queen.streams.operators import Foreach, Sink
from queen.streams.records import Emit


async def deliver(chain: Chain, emits: Sequence[Emit], partition: str, partition_id: str) -> list[dict[str, Any]]:
    """Run the effects of a `foreach`; the items that a sink is to be pushed."""
    made = await _apply(chain, emits, partition, partition_id)
    if isinstance(chain.end, Sink):
        return chain.end.push_items(made, partition)
    if isinstance(chain.end, Foreach):
        await chain.end.run(made, partition, partition_id)
    return []


async def _apply(chain: Chain, emits: Sequence[Emit], partition: str, partition_id: str) -> list[Emit]:
    made = list(emits)
    for operator in chain.after:
        before, made = made, []
        for emit in before:
            values = await operator.values(emit.value, emit.value, emit.context(partition, partition_id))
            # A function that returns nothing leaves the value as it was.
            made += [emit if value is None else replace(emit, value=value) for value in values]
    return made
