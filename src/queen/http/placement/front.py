"""What stands in front of the brokers of several shards, wired."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from queen.broker.broker import Broker
from queen.broker.sharding.directory import Directory
from queen.broker.sharding.namespace_rules import NamespaceRules
from queen.broker.sharding.upkeep import Forwarding, Joining
from queen.http.placement.calls import Calls
from queen.http.placement.consuming import ManyShards
from queen.http.placement.table import Placement
from queen.http.server.router import Router
from queen.settings import Settings


class Routes(Protocol):
    """Some routes of one broker."""

    def add_to(self, router: Router) -> None: ...


class Front:
    """Serves the routes of all shards as if they were one."""

    def __init__(self, settings: Settings, brokers: Sequence[Broker]) -> None:
        self._brokers = brokers
        self._joining = Joining(settings.database_dsns)
        self.directory = Directory([broker.database for broker in brokers])
        self.consuming = ManyShards(self.directory, brokers)
        self.placement = Placement(Calls(self.directory), NamespaceRules(self.directory, brokers), brokers)
        Forwarding(self.directory, brokers)
        for broker in brokers:
            broker.siblings = brokers

    def add_to(self, router: Router, routes_of: Callable[[Broker], Iterable[Routes]]) -> None:
        """Add every route that a broker has, placed."""
        tables = []
        for broker in self._brokers:
            inner = Router()
            for routes in routes_of(broker):
                routes.add_to(inner)
            tables.append(inner.routes)
        for served in zip(*tables, strict=True):
            route = served[0]
            handlers = [one.handler for one in served]
            handler = self.placement.handler(route.method, route.pattern, handlers)
            router.add(route.method, route.pattern, handler, route.access)

    async def join(self) -> None:
        """Before any of the brokers is used: have every database be its shard."""
        await self._joining.start()

    async def start(self) -> None:
        await self.directory.start()

    async def stop(self) -> None:
        await self._joining.stop()
        await self.directory.stop()
