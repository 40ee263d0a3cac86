"""The permission matrix, made from the route table: every route with every kind of token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from queen.embedded import EmbeddedPostgres
from queen.http.auth.browser import takes_messages
from queen.http.auth.resources import is_about_topics
from queen.http.server.message import Access, Route
from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, forge, issue
from tests.http.auth.world import Asked, Tenant
from tests.support.api import Answer, Api
from tests.support.databases import fresh_database


def good(role: str | None, **claims: Any) -> str:
    """A token that the server accepts."""
    return issue(role, **{"aud": "queen", "iss": "https://idp"} | claims)


ROLES = {
    "admin": Access.ADMIN,
    "read-write": Access.READ_WRITE,
    "read-only": Access.READ_ONLY,
    "none": Access.PUBLIC,
}
REFUSED = {
    "no token": (None, "Authentication required"),
    "expired": (good("admin", exp=1), "Token has expired"),
    "not valid yet": (good("admin", nbf=2**40), "Token is not valid yet"),
    "wrong signature": (good("admin", secret="another secret, of thirty-two bytes too"), "Invalid token signature"),
    "wrong audience": (good("admin", aud="somebody else"), "Invalid token audience"),
    "wrong issuer": (good("admin", iss="https://elsewhere"), "Invalid token issuer"),
    "no signature": (good("admin").rpartition(".")[0] + ".", "Invalid token signature"),
    "no algorithm": (forge({"alg": "none"}, {"role": "admin", "aud": "queen"}), "Token uses none, expected"),
}
PUBLIC = {
    "GET /health",
    "GET /livez",
    "GET /readyz",
    "GET /metrics",
    "GET /metrics/prometheus",
    "GET /openapi.json",
    "GET /docs",
}
# What may be asked of one's own with a token for some queues, topics and namespaces; everything else is about all.
CLOSED_TO_LIMITED = {
    "POST /api/v1/locks",
    "GET /api/v1/locks",
    "GET /api/v1/kv",
    "DELETE /api/v1/consumer-groups/{group}",
    "GET /api/v1/analytics/postgres-stats",
    "GET /api/v1/analytics/system-metrics",
    "GET /api/v1/analytics/worker-metrics",
    "GET /api/v1/audit",
    "GET /api/v1/consumer-groups",
    "GET /api/v1/consumer-groups/lagging",
    "GET /api/v1/consumer-groups/{group}",
    "GET /api/v1/events",
    "GET /api/v1/live",
    "GET /api/v1/migration/status",
    "GET /api/v1/pipeline-declarations",
    "GET /api/v1/pipelines",
    "GET /api/v1/resources/namespaces",
    "GET /api/v1/resources/overview",
    "GET /api/v1/resources/tasks",
    "GET /api/v1/shards",
    "GET /api/v1/shards/moves",
    "GET /api/v1/status",
    "GET /api/v1/status/analytics",
    "GET /api/v1/status/buffers",
    "GET /api/v1/streams",
    "GET /api/v1/system/connections",
    "GET /api/v1/ephemeral/queues",
    "GET /api/v1/tasks",
    "GET /api/v1/system/maintenance",
    "GET /api/v1/system/maintenance/pop",
    "GET /api/v1/system/settings",
    "GET /api/v1/system/shared-state",
    "GET /api/v1/topics/modes",
    "GET /api/v1/topics/namespaces",
    "GET /api/v1/topics/quotas",
    "GET /api/v1/traces/by-name/{name}",
    "GET /api/v1/traces/names",
    "GET /internal/api/inter-instance/stats",
    "GET /internal/api/shared-state/stats",
    "GET /streams/v1/queries",
    "POST /api/v1/consumer-groups/{group}/subscription",
    "POST /api/v1/migration/reset",
    "POST /api/v1/migration/start",
    "POST /api/v1/migration/test-connection",
    "POST /api/v1/migration/validate",
    "POST /api/v1/pipelines/replay",
    "POST /api/v1/shards/move",
    "POST /api/v1/stats/refresh",
    "POST /api/v1/system/maintenance",
    "POST /api/v1/system/maintenance/pop",
    "POST /internal/api/events",
    "POST /internal/api/notify",
    "DELETE /api/v1/pipeline-declarations/{pipeline}",
    "DELETE /streams/v1/queries/{stream}",
    "PUT /api/v1/pipeline-declarations",
}
# Served, although what it is about may be gone by then, or (409, 426) is not for ordinary clients.
SERVED = (200, 201, 204, 404, 409, 426)
# Counted by the clock, not by requests.
_UNSTEADY = "metric|rollup|sample|schema|audit|hosts|workers|jobs|leaders"


GUARDED: dict[str, Any] = {
    "jwt_enabled": True,
    "jwt_secret": SECRET,
    "jwt_audience": "queen",
    "jwt_issuer": "https://idp",
}


@pytest.fixture
async def guarded(start_server: StartServer) -> Api:
    return await start_server(**GUARDED)


def routes_of(api: Api) -> list[Route]:
    assert api.worker is not None
    # What ends a thing comes last, so that requests before find it.
    ends = ("DELETE", "purge", "abandon", "/dlq", "seek", "/ack", "/nack", "/release")
    return sorted(api.worker.http.router.routes, key=lambda route: any(end in _key(route) for end in ends))


def _key(route: Route) -> str:
    return f"{route.method} {route.pattern}"


@asynccontextmanager
async def bearing(api: Api, token: str | None) -> AsyncIterator[Api]:
    caller = api.bearing(token)
    try:
        yield caller
    finally:
        await caller.close()


async def settled(api: Api, *names: str) -> list[Tenant]:
    tenants = [Tenant(name) for name in names]
    async with bearing(api, good("admin")) as admin:
        for tenant in tenants:
            await tenant.settle(admin)
    return tenants


async def contents(connection: asyncpg.Connection[asyncpg.Record]) -> dict[str, str]:
    """All rows of all tables of queues and topics, as a digest for each table."""
    found = await connection.fetch(
        "SELECT tablename FROM pg_tables WHERE schemaname IN ('queen', 'queen_proxy') AND tablename !~ $1", _UNSTEADY
    )
    return {
        row["tablename"]: await connection.fetchval(
            f"SELECT md5(coalesce(string_agg(t::text, '' ORDER BY t::text), '')) FROM queen.\"{row['tablename']}\" t"
        )
        for row in found
        if row["tablename"] not in ("users", "sessions")
    }


async def test_only_these_routes_are_public(guarded: Api) -> None:
    assert {_key(route) for route in routes_of(guarded) if route.access is Access.PUBLIC} == PUBLIC


async def test_every_route_refuses_requests_without_a_valid_token(
    guarded: Api, connection: asyncpg.Connection[asyncpg.Record]
) -> None:
    (tenant,) = await settled(guarded, "theirs")
    before = await contents(connection)
    for kind, (token, text) in REFUSED.items():
        async with bearing(guarded, token) as nobody:
            for route in routes_of(guarded):
                answer = await tenant.ask(route).send(nobody)
                if route.access is Access.PUBLIC:
                    assert answer.status not in (401, 403), route
                    continue
                assert answer.status == 401, (kind, route)
                assert answer.body["error"].startswith(text), (kind, route)
                assert answer.headers["WWW-Authenticate"].startswith('Bearer realm="queen"'), (kind, route)
        assert await contents(connection) == before, f"a request that was refused has changed something: {kind}"


@pytest.mark.parametrize("role", ROLES)
async def test_every_route_admits_the_roles_of_its_level_and_no_other(
    guarded: Api, connection: asyncpg.Connection[asyncpg.Record], role: str
) -> None:
    (tenant,) = await settled(guarded, "theirs")
    before = await contents(connection)
    token = good(role if role != "none" else None)
    async with bearing(guarded, token) as caller:
        for route in routes_of(guarded):
            if ROLES[role] < route.access:
                answer = await tenant.ask(route).send(caller)
                assert (answer.status, answer.body["error"]) == (403, "Insufficient permissions"), route
        assert await contents(connection) == before, "a request that was refused has changed something"
        for route in routes_of(guarded):
            if ROLES[role] >= route.access:
                answer = await tenant.ask(route).send(caller)
                # Good requests: that they were refused above was for want of a role, and of nothing else.
                assert answer.status in SERVED, (route, answer)
    if role == "admin":
        changed = {name for name, digest in (await contents(connection)).items() if digest != before[name]}
        assert {"segments", "cursors", "queues", "topic_items", "stages", "stream_queries"} <= changed


@pytest.mark.parametrize("claim", ["queues", "namespaces", "both"])
async def test_a_limited_token_reaches_its_own_and_nothing_else(
    guarded: Api, connection: asyncpg.Connection[asyncpg.Record], claim: str
) -> None:
    await check_limits(guarded, [connection], claim)


@pytest.mark.parametrize("claim", ["queues", "namespaces"])
async def test_limits_hold_on_several_shards(
    start_server: StartServer, dsn: str, postgres: EmbeddedPostgres, claim: str
) -> None:
    async with fresh_database(postgres) as second:
        api = await start_server(database_urls=(dsn, second), **GUARDED)
        connections = [await asyncpg.connect(each) for each in (dsn, second)]
        await check_limits(api, connections, claim)
        for connection in connections:
            await connection.close()
        # So that its database can be dropped.
        assert api.worker is not None
        await api.worker.stop()


async def check_limits(api: Api, connections: Sequence[asyncpg.Connection[asyncpg.Record]], claim: str) -> None:
    """Whatever a route is about, and whatever the role."""
    theirs, mine = await settled(api, "theirs", "mine")
    limits = {"queues": ["mine*"], "namespaces": ["mine"]}
    chosen: dict[str, Any] = limits if claim == "both" else {claim: limits[claim]}
    before = [await contents(connection) for connection in connections]
    closed = set()
    async with bearing(api, good("admin", **chosen)) as caller:
        for route in routes_of(api):
            if route.access is Access.PUBLIC or route.upgrade is not None:
                continue
            answer = await theirs.ask(route).send(caller)
            assert answer.status == 403, (_key(route), answer)
            assert answer.body["error"] == "Insufficient permissions", (_key(route), answer)
        after = [await contents(connection) for connection in connections]
        assert after == before, "a request that was refused has changed something"
        for route in routes_of(api):
            if route.access is Access.PUBLIC or route.upgrade is not None:
                continue
            answer = await mine.ask(route).send(caller)
            if answer.status == 403:
                closed.add(_key(route))
                continue
            assert answer.status in SERVED, (route, answer)
            assert "theirs" not in _text(answer), (route, answer)
    # With names of queues alone nothing can be asked about a namespace.
    of_namespaces = {
        "GET /api/v1/pop",
        "GET /api/v1/resources/queues",
        "GET /api/v1/status/queues",
        "GET /api/v1/topics",
        "GET /api/v1/topics/dequeue/many",
        "GET /topics",
        "PUT /api/v1/topics/modes",
        "PUT /api/v1/topics/quotas",
    }
    assert closed == CLOSED_TO_LIMITED | (of_namespaces if claim != "namespaces" else set())


# What a request does its work on. Other fields are looked for among what these name.
NAMING = {
    "queue",
    "namespace",
    "topic",
    "items",
    "operations",
    "acknowledgments",
    "entries",
    "partitionId",
    "partition_id",
    "query_id",
    "push_items",
    "source_queue",
    "sink_queue",
    "run",
}


async def test_one_foreign_name_among_ones_own_refuses_the_request(
    guarded: Api, connection: asyncpg.Connection[asyncpg.Record]
) -> None:
    theirs, mine = await settled(guarded, "theirs", "mine")
    before = await contents(connection)
    refused = set()
    async with bearing(guarded, good("admin", queues=["mine*"], namespaces=["mine"])) as caller:
        for route in routes_of(guarded):
            if route.access is Access.PUBLIC or route.upgrade is not None:
                continue
            own, foreign = mine.ask(route), theirs.ask(route)
            for mixed, name in mixtures(own, foreign):
                if (_key(route), name) == ("POST /api/v1/stages", "run"):
                    mixed = replace(mixed, body=mixed.body | {"batch": 1})  # in which there is something
                answer = await mixed.send(caller)
                assert answer.status == 403, (_key(route), mixed, answer)
                refused.add((_key(route), name))
    assert await contents(connection) == before, "a request that was refused has changed something"
    assert len(refused) > 60


def mixtures(own: Asked, foreign: Asked) -> Iterator[tuple[Asked, str]]:
    """One's own request with one of its names replaced by another's; to a list, another's are added."""
    for name in own.query:
        if name in NAMING:
            yield replace(own, query=own.query | {name: foreign.query[name]}), name
    if isinstance(own.body, list):
        yield replace(own, body=own.body + foreign.body), ""
    elif isinstance(own.body, dict):
        for name, value in own.body.items():
            if name in NAMING and value != foreign.body[name]:
                other = value + foreign.body[name] if isinstance(value, list) else foreign.body[name]
                yield replace(own, body=own.body | {name: other}), name


async def test_every_kind_of_operation_of_a_transaction_is_checked(guarded: Api) -> None:
    theirs, mine = await settled(guarded, "theirs", "mine")
    routes = {_key(route): route for route in routes_of(guarded)}

    def bodies(tenant: Tenant) -> list[dict[str, Any]]:
        ack, kv, items, timers = (
            tenant.ask(routes[key]).body
            for key in ("POST /api/v1/ack", "POST /api/v1/kv", "POST /enqueue", "POST /api/v1/timers")
        )
        return [
            {"operations": [{"type": "ack", **ack}]},
            {"operations": [{"type": "enqueue", "items": items}]},
            {"operations": [], "kv": kv["operations"]},
            {"operations": [], "timers": timers["operations"]},
        ]

    push = mine.ask(routes["POST /api/v1/transaction"]).body["operations"]
    async with bearing(guarded, good("read-write", queues=["mine*"], namespaces=["mine"])) as caller:
        for tenant, status in ((theirs, 403), (mine, 200)):
            for body in bodies(tenant):
                body["operations"] = push + body["operations"]
                answer = await caller.call("POST", "/api/v1/transaction", body)
                assert answer.status == status, (body, answer)


def _text(answer: Answer) -> str:
    return answer.body.decode("latin-1") if isinstance(answer.body, bytes) else str(answer.body)


async def test_a_token_for_some_groups_learns_of_no_other(
    guarded: Api, connection: asyncpg.Connection[asyncpg.Record]
) -> None:
    (tenant,) = await settled(guarded, "theirs")
    before = await contents(connection)
    async with bearing(guarded, good("admin", groups=["mine*"])) as caller:
        for route in routes_of(guarded):
            if route.access is Access.PUBLIC or route.upgrade is not None or is_about_topics(route):
                continue
            asked = tenant.ask(route)
            # A group that is named where nobody reads it opens nothing.
            for query in (asked.query, asked.query | {"consumerGroup": "mine", "group": "mine"}):
                if _key(route) in CHANGES_WITHOUT_GROUPS or (query is not asked.query and _reads_group(route)):
                    continue
                answer = await Asked(asked.method, asked.path, query, asked.body, asked.data).send(caller)
                if answer.status == 403:
                    assert answer.body["error"] == "Insufficient permissions", route
                assert tenant.group not in _text(answer) or answer.status == 403, (route, answer)
    assert await contents(connection) == before


CHANGES_WITHOUT_GROUPS = {
    "DELETE /api/v1/messages/{partition}/{transaction}",
    "POST /api/v1/configure",
    "POST /api/v1/ephemeral/push",
    "POST /api/v1/kv",
    "POST /api/v1/timers",
    "DELETE /api/v1/timers/{queue}/{timer}",
    "POST /api/v1/lease/{lease}/extend",
    "POST /api/v1/push",
    "POST /api/v1/stages",
    "POST /api/v1/stages/abandon",
    "POST /api/v1/stages/publish",
    "POST /api/v1/transaction",
    "POST /api/v1/messages/delete",
    "POST /streams/v1/queries",
}


def _reads_group(route: Route) -> bool:
    return (
        route.pattern.startswith(("/api/v1/pop", "/api/v1/ephemeral/pop"))
        or "/dlq" in route.pattern
        or route.pattern.endswith("/rollup")
    )


@pytest.mark.parametrize(
    ("scopes", "reads", "writes"),
    [
        (["mine:read"], True, False),
        (["mine:write"], False, True),
        (["mine:*"], True, True),
        (["*:read"], True, False),
        (["*:*"], True, True),
        (["other:*", "theirs"], False, False),
        ([], False, False),
    ],
)
async def test_every_route_of_topics_keeps_to_the_scopes(
    guarded: Api, connection: asyncpg.Connection[asyncpg.Record], scopes: list[str], reads: bool, writes: bool
) -> None:
    theirs, mine = await settled(guarded, "theirs", "mine")
    before = await contents(connection)
    token = good(None, scopes=scopes)
    async with bearing(guarded, token) as caller:
        for tenant, routes in ((theirs, routes_of(guarded)), (mine, routes_of(guarded))):
            for route in routes:
                if route.access is Access.PUBLIC:
                    continue
                granted = {Access.READ_ONLY: reads, Access.READ_WRITE: writes}.get(route.access, False)
                if takes_messages(route):
                    # mqueue's `read` includes dequeueing.
                    granted = reads
                admitted = granted and is_about_topics(route) and (tenant is mine or "*" in scopes[0][:1])
                if admitted and _key(route) in ("GET /api/v1/topics/namespaces",):
                    continue  # about all namespaces
                if tenant is theirs and admitted:
                    continue  # said by the rows without a star
                answer = await tenant.ask(route).send(caller)
                assert answer.status in (SERVED if admitted else (403,)), (route, answer)
            if tenant is theirs:
                assert await contents(connection) == before, "a request that was refused has changed something"
