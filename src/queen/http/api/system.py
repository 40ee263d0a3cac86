"""What the server says of itself: settings in force, shards, streaming queries, pipelines, connections."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from queen.broker.broker import Broker
from queen.concurrency import SingleFlightCache
from queen.errors import DatabaseUnavailable
from queen.http.server.message import Request, Response, json_response
from queen.http.server.protocol import Shell
from queen.http.server.router import Access, Router
from queen.monitoring.recorder import Recorder
from queen.settings import Settings, describe_settings
from queen.storage.database import Record
from queen.wire.pipelines import statuses
from queen.wire.system import (
    LiveCounters,
    PeerList,
    PeerView,
    PipelineList,
    SettingInForce,
    SettingsInForce,
    ShardList,
    ShardView,
    StreamQueryList,
    StreamQueryView,
    TopicNamespaceList,
    TopicNamespaceView,
)

_CACHE_SECONDS: Final = 2.0
"""State is counted row by row, so many open dashboards share one count."""


class SystemRoutes:
    """Answers for all shards at once."""

    def __init__(
        self,
        settings: Settings,
        brokers: Sequence[Broker],
        shell: Shell,
        recorder: Recorder,
        worker_id: int,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._settings = settings
        self._brokers = brokers
        self._shell = shell
        self._recorder = recorder
        self._worker_id = worker_id
        self._environ = environ
        self._streams = SingleFlightCache(self._find_streams, _CACHE_SECONDS)
        self._shards = SingleFlightCache(self._find_shards, _CACHE_SECONDS)

    def add_to(self, router: Router) -> None:
        router.add("GET", "/api/v1/system/settings", self.settings, Access.ADMIN)
        router.add("GET", "/api/v1/system/connections", self.connections, Access.ADMIN)
        router.add("GET", "/api/v1/live", self.live, Access.READ_ONLY)
        router.add("GET", "/api/v1/shards", self.shards, Access.READ_ONLY)
        router.add("GET", "/api/v1/streams", self.streams, Access.READ_ONLY)
        router.add("GET", "/api/v1/pipelines", self.pipelines, Access.READ_ONLY)
        router.add("GET", "/api/v1/topics/namespaces", self.namespaces, Access.READ_ONLY)

    def settings(self, request: Request) -> Response:
        found = []
        for item in describe_settings():
            value = item.show(self._settings)
            given = item.variable in self._environ or f"{item.variable}_FILE" in self._environ
            changed = getattr(self._settings, item.field) != getattr(Settings, item.field, None)
            source = "environment" if given else "command line" if changed else "default"
            found.append(
                SettingInForce(
                    variable=item.variable,
                    value=value,
                    default=item.default_text,
                    unit=item.unit,
                    meaning=item.meaning,
                    source=source,
                )
            )
        return json_response(200, SettingsInForce(worker_id=self._worker_id, settings=found))

    def connections(self, request: Request) -> Response:
        peers: dict[str, Counter[str]] = {}
        totals: Counter[str] = Counter()
        for connection in self._shell.connections:
            peer, route = connection.serving()
            totals[peer] += 1
            requests = peers.setdefault(peer, Counter())
            if route:
                requests[route] += 1
        views = [PeerView(peer=peer, connections=count, requests=peers[peer]) for peer, count in totals.most_common()]
        return json_response(200, PeerList(worker_id=self._worker_id, workers=self._settings.num_workers, peers=views))

    async def live(self, request: Request) -> Response:
        """For those who ask every second: counters of all workers of this host, from memory."""
        reports = await self._recorder.reports()
        totals = [report.total for report in reports]

        def now(name: str) -> int:
            return round(sum(report.last(name) for report in reports))

        return json_response(
            200,
            LiveCounters(
                push_messages=sum(total.push_messages for total in totals),
                pop_messages=sum(total.pop_messages for total in totals),
                ack_messages=sum(total.ack_success + total.auto_acked for total in totals),
                http_responses=sum(total.http_responses for total in totals),
                parked_pops=now("parked"),
                in_flight=now("in_flight"),
                pool_size=now("pool_size"),
                pool_active=now("pool_active"),
            ),
        )

    async def shards(self, request: Request) -> Response:
        return json_response(200, await self._shards.get())

    async def streams(self, request: Request) -> Response:
        return json_response(200, await self._streams.get())

    async def namespaces(self, request: Request) -> Response:
        """A namespace may have topics on several shards; its quota is kept where it is at home."""
        found: dict[str, TopicNamespaceView] = {}
        for row in await self._everywhere("topic_namespace_list"):
            view = found.setdefault(
                row["name"], TopicNamespaceView(namespace=row["name"], topics=0, quota_per_minute=None)
            )
            view.topics += row["topics"]
            if row["quota_per_minute"] is not None:
                view.quota_per_minute = row["quota_per_minute"]
        return json_response(200, TopicNamespaceList(namespaces=[found[name] for name in sorted(found)]))

    def pipelines(self, request: Request) -> Response:
        found = sorted(statuses(self._settings.queen_data_dir / "pipelines"), key=lambda status: status.name)
        return json_response(200, PipelineList(pipelines=found))

    async def _find_streams(self) -> StreamQueryList:
        answers = await asyncio.gather(*(_rows(broker, "stream_query_list") for broker in self._brokers))
        found = [StreamQueryView(shard=shard, **dict(row)) for shard, rows in enumerate(answers) for row in rows]
        return StreamQueryList(queries=sorted(found, key=lambda query: query.name))

    async def _find_shards(self) -> ShardList:
        places = [_place(dsn) for dsn in self._settings.database_dsns]
        shards = zip(places, self._brokers, strict=True)
        found = await asyncio.gather(*(_shard(number, *shard) for number, shard in enumerate(shards)))
        return ShardList(shards=found)

    async def _everywhere(self, statement: str) -> list[Record]:
        answers = await asyncio.gather(*(_rows(broker, statement) for broker in self._brokers))
        return [row for rows in answers for row in rows]


async def _rows(broker: Broker, statement: str) -> list[Record]:
    """What a shard answers; of several, one that is unavailable is left out."""
    try:
        return await broker.database.fetch(statement)
    except DatabaseUnavailable:
        if len(broker.siblings) > 1:
            return []
        raise


async def _shard(number: int, place: str, broker: Broker) -> ShardView:
    view = ShardView(shard=number, up=not broker.database.presence.away, database=place)
    try:
        (row,) = await broker.database.fetch("shard_inventory")
    except DatabaseUnavailable:
        view.up = False
        return view
    view.queues, view.partitions, view.topics, view.bytes = (
        row["queues"],
        row["partitions"],
        row["topics"],
        row["bytes"],
    )
    return view


def _place(dsn: str) -> str:
    """Where a database is, without who may use it."""
    url = urlsplit(dsn)
    port = f":{url.port}" if url.port else ""
    return f"{url.hostname or 'local socket'}{port}{url.path}"
