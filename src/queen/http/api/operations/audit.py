"""The audit log: changes by administrators."""

from __future__ import annotations

import msgspec

from queen.http.routing.call import Call
from queen.http.routing.context import Api
from queen.http.routing.route import DATABASE, RouteTable
from queen.http.server.message import Access
from queen.storage.database import storable
from queen.wire.api.operations.audit import AuditEntry, AuditLog, AuditQuery
from queen.wire.times import iso_millis

routes = RouteTable("System")


@routes.on_worker(
    "GET",
    "/api/v1/audit",
    access=Access.ADMIN,
    id="auditLog",
    summary="List what administrators did",
    description="The newest first. `before` is what there was, `after` what was sent. Kept for AUDIT_RETENTION_DAYS.",
    query=AuditQuery,
    returns={200: AuditLog},
    errors=DATABASE,
)
async def audit_log(api: Api, call: Call[AuditQuery, None]) -> AuditLog:
    query = call.query
    actor, action = storable(query.actor), storable(query.action)
    rows = await api.brokers[0].database.fetch("audit_page", actor, action, query.before, query.limit)
    return AuditLog(
        [
            AuditEntry(
                row["id"],
                iso_millis(row["at"]),
                row["actor"],
                row["address"],
                row["action"],
                row["object"],
                row["status"],
                msgspec.Raw((row["before"] or "null").encode()),
                msgspec.Raw((row["after"] or "null").encode()),
            )
            for row in rows
        ]
    )
