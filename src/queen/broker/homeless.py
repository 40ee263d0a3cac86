"""Pops that wait for queues which do not exist yet."""

from __future__ import annotations

from collections.abc import Iterator

from queen.broker.pop import Pop


class Homeless:
    """Pops by the name of the queue that they wait for."""

    def __init__(self) -> None:
        self._pops: dict[str, list[Pop]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._pops.values()))

    def __iter__(self) -> Iterator[Pop]:
        return iter([pop for pops in self._pops.values() for pop in pops])

    def queue_names(self) -> set[str]:
        return set(self._pops)

    def add(self, name: str, pop: Pop) -> None:
        waiting = self._pops.setdefault(name, [])
        waiting[:] = [other for other in waiting if not other.done]
        waiting.append(pop)

    def leave(self, name: str) -> list[Pop]:
        """The queue exists now: those who waited for it, and still do."""
        return [pop for pop in self._pops.pop(name, ()) if not pop.done]

    def waiting(self) -> dict[str, int]:
        """How many wait for each queue that somebody still waits for."""
        counts = {name: sum(1 for pop in pops if not pop.done) for name, pops in self._pops.items()}
        return {name: count for name, count in counts.items() if count}

    def sweep(self) -> None:
        """Forget the queues that nobody waits for any more."""
        self._pops = {name: pops for name, pops in self._pops.items() if not all(pop.done for pop in pops)}
