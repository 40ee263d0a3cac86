"""Pops over all queues of a namespace or task."""

from __future__ import annotations

import asyncio

from queen.broker.pop.popper import Popper
from queen.broker.pop.requests import PopRequest, is_empty, unchanged
from queen.log.catalog import Catalog

_REFRESH_SECONDS = 2.0


class NamespacePops:
    """The queues of a namespace and task, cached for a short time."""

    def __init__(self, catalog: Catalog, popper: Popper) -> None:
        self._catalog = catalog
        self._popper = popper

    async def pop(self, namespace: str, task: str, request: PopRequest) -> bytes | None:
        """Pop from the queues that match, those of higher priority first; queues made meanwhile join in."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.timeout
        body: bytes | None = None
        while True:
            queues = await self._matching(namespace, task)
            left = deadline - loop.time()
            if queues:
                some = request.of(queues)
                if request.wait:
                    some = some.waiting(max(0.0, min(left, _REFRESH_SECONDS)))
                body = await self._popper.pop(some, unchanged)
                if not is_empty(body) or not request.wait:
                    return body
            elif not request.wait:
                return None
            left = deadline - loop.time()
            if left <= 0:
                return body
            if not queues:
                await asyncio.sleep(min(left, 0.2))

    async def _matching(self, namespace: str, task: str) -> tuple[str, ...]:
        queues = [
            queue
            for queue in await self._catalog.all_queues()
            if (not namespace or queue.namespace == namespace) and (not task or queue.task == task)
        ]
        queues.sort(key=lambda queue: (-queue.priority, queue.id))
        return tuple(queue.name for queue in queues)
