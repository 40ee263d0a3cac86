"""The server itself: settings in force, live counters, streaming queries, connections."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence

from queen.broker.broker import Broker
from queen.errors import DatabaseUnavailable
from queen.http.routing.call import Call
from queen.http.routing.context import Api
from queen.http.routing.route import DATABASE, RouteTable
from queen.http.server.message import Access
from queen.metrics.report import ALIVE_SECONDS
from queen.settings import Settings, describe_settings
from queen.storage.database import Record
from queen.wire.api.operations.system import (
    LiveCounters,
    PeerList,
    PeerView,
    SettingInForce,
    SettingsInForce,
    StreamQueryList,
    StreamQueryView,
    TopicNamespaceList,
    TopicNamespaceView,
)

routes = RouteTable("System")


@routes.on_worker(
    "GET",
    "/api/v1/system/settings",
    access=Access.ADMIN,
    summary="Settings in force",
    description="Of the worker that answers, with the source of each value. Secrets are not shown.",
    returns={200: SettingsInForce},
)
async def list_settings(api: Api, call: Call[None, None]) -> SettingsInForce:
    found = [
        SettingInForce(
            variable=item.variable,
            value=item.show(api.settings),
            default=item.default_text,
            unit=item.unit,
            meaning=item.meaning,
            source=_source(api.settings, item.field, item.variable),
        )
        for item in describe_settings()
    ]
    return SettingsInForce(worker_id=api.brokers[0].worker_id, settings=found)


@routes.on_worker(
    "GET",
    "/api/v1/system/connections",
    access=Access.ADMIN,
    summary="Open connections",
    description="To this host, by address, with the requests that are being served: to the worker that answers as "
    "they are now, to the others as they were about a second ago.",
    returns={200: PeerList},
)
async def list_connections(api: Api, call: Call[None, None]) -> PeerList:
    peers: dict[str, Counter[str]] = {}
    totals: Counter[str] = Counter()
    for report in await api.recorder.reports():
        if report.at < time.time() - ALIVE_SECONDS:
            continue
        for place, count in report.connections.items():
            peer, _, route = place.partition("\n")
            totals[peer] += count
            requests = peers.setdefault(peer, Counter())
            if route:
                requests[route] += count
    views = [PeerView(peer=peer, connections=count, requests=peers[peer]) for peer, count in totals.most_common()]
    return PeerList(worker_id=api.brokers[0].worker_id, workers=api.settings.num_workers, peers=views)


@routes.on_worker(
    "GET",
    "/api/v1/live",
    access=Access.READ_ONLY,
    tag="Status",
    summary="Live counters of this host",
    description="Made to be polled every second: it runs no query.",
    returns={200: LiveCounters},
)
async def live(api: Api, call: Call[None, None]) -> LiveCounters:
    reports = await api.recorder.reports()
    totals = [report.total for report in reports]

    def now(name: str) -> int:
        return round(sum(report.last(name) for report in reports))

    return LiveCounters(
        push_messages=sum(total.push_messages for total in totals),
        pop_messages=sum(total.pop_messages for total in totals),
        ack_messages=sum(total.ack_success + total.auto_acked for total in totals),
        http_responses=sum(total.http_responses for total in totals),
        parked_pops=now("parked"),
        in_flight=now("in_flight"),
        pool_size=now("pool_size"),
        pool_active=now("pool_active"),
    )


@routes.on_worker(
    "GET",
    "/api/v1/streams",
    access=Access.READ_ONLY,
    tag="Streams",
    id="listStreamQueries",
    summary="Streaming queries and the state they keep",
    returns={200: StreamQueryList},
    errors=DATABASE,
    cached=True,
)
async def list_stream_queries(api: Api, call: Call[None, None]) -> StreamQueryList:
    answers = await _rows(api.brokers, "stream_query_list")
    found = [StreamQueryView(shard=shard, **dict(row)) for shard, rows in enumerate(answers) for row in rows]
    return StreamQueryList(queries=sorted(found, key=lambda query: query.name))


@routes.on_worker(
    "GET",
    "/api/v1/topics/namespaces",
    access=Access.READ_ONLY,
    of_topics=True,
    of_groups=False,
    tag="Topics",
    summary="List namespaces of topics",
    returns={200: TopicNamespaceList},
    errors=DATABASE,
)
async def list_topic_namespaces(api: Api, call: Call[None, None]) -> TopicNamespaceList:
    """A namespace may have topics on several shards; its quota is kept, and its use counted, on its home shard."""
    found: dict[str, TopicNamespaceView] = {}
    answers = await _rows(api.brokers, "topic_namespace_list")
    for broker, rows in zip(api.brokers, answers, strict=True):
        for row in rows:
            view = found.setdefault(
                row["name"],
                TopicNamespaceView(
                    namespace=row["name"], topics=0, quota_per_minute=None, limit_per_minute=None, used_last_minute=None
                ),
            )
            view.topics += row["topics"]
            if row["quota_per_minute"] is not None:
                view.quota_per_minute = row["quota_per_minute"]
            used = await broker.topics.quotas.used(row["name"], row["used"])
            if used is not None:
                view.limit_per_minute = await broker.topics.quotas.limit(row["name"])
                view.used_last_minute = max(view.used_last_minute or 0, used)
    return TopicNamespaceList(namespaces=[found[name] for name in sorted(found)])


def _source(settings: Settings, field: str, variable: str) -> str:
    if variable in os.environ or f"{variable}_FILE" in os.environ:
        return "environment"
    return "command line" if getattr(settings, field) != getattr(Settings, field, None) else "default"


async def _rows(brokers: Sequence[Broker], statement: str) -> list[list[Record]]:
    """What each shard answers. One that is unavailable is left out, unless nothing would be left to show."""
    found: list[list[Record]] = []
    missing: DatabaseUnavailable | None = None
    for answer in await asyncio.gather(*(one.database.fetch(statement) for one in brokers), return_exceptions=True):
        if isinstance(answer, DatabaseUnavailable):
            missing = answer
            found.append([])
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found.append(answer)
    if missing is not None and not any(found):
        raise missing
    return found
