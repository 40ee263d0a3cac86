"""Other hosts: what they tell this one, and what is known of them."""

from __future__ import annotations

from typing import Any

from queen.broker.broker import Broker
from queen.bus.packets import ROUTE, PacketRefusal, PacketRefused
from queen.errors import BadRequest, Conflict
from queen.http.server.message import HttpError, Request, Response, json_response
from queen.http.server.router import Access, Router
from queen.wire.ack import decode_object
from queen.wire.push import check_name

_REASONS = {
    PacketRefusal.MALFORMED: (400, "the body is not a packet of another Queen host"),
    PacketRefusal.UNSIGNED: (401, "the packet is not signed: set QUEEN_SYNC_SECRET on the sender, as it is set here"),
    PacketRefusal.FORGED: (401, "the signature is wrong: QUEEN_SYNC_SECRET must be the same on all hosts"),
    PacketRefusal.STALE: (401, "the packet is too old or from the future: set the clocks of both hosts"),
    PacketRefusal.REPLAYED: (401, "the packet has been received before"),
}


class ClusterRoutes:
    """Waking pops by hand, packets of other hosts, and figures."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def add_to(self, router: Router) -> None:
        router.add("POST", "/internal/api/notify", self.notify, Access.ADMIN)
        # A signature proves that it comes from a host; without a secret, the role of whoever calls has to.
        router.add("POST", ROUTE, self.events, Access.PUBLIC if self._broker.peers.signed else Access.ADMIN)
        for path in (
            "/api/v1/system/shared-state",
            "/internal/api/shared-state/stats",
            "/internal/api/inter-instance/stats",
        ):
            router.add("GET", path, self.shared_state, Access.ADMIN)

    async def notify(self, request: Request) -> Response:
        """Have parked pops of a queue, or of one partition of it, look for messages, on every host."""
        body = decode_object(request.body)
        queue, partition = body.get("queue"), body.get("partition")
        if not isinstance(queue, str) or not queue:
            raise BadRequest("queue is required")
        check_name(queue, "Queue", "queue")
        if partition is not None:
            if not isinstance(partition, str):
                raise BadRequest("partition must be a string (at partition)")
            check_name(partition, "Partition", "partition")
        await self._broker.notify(queue, partition)
        return json_response(200, {"status": "ok"})

    def events(self, request: Request) -> Response:
        """Take in a packet of another host."""
        if not self._broker.peers.enabled:
            raise Conflict("QUEEN_SYNC_ENABLED is false here: this host takes nothing from others")
        try:
            own = self._broker.peers.receive(request.body)
        except PacketRefused as refused:
            raise HttpError(*_REASONS[refused.reason]) from refused
        return json_response(200, {"status": "ok", "self": own})

    def shared_state(self, request: Request) -> Response:
        return json_response(200, shared_state(self._broker))


def shared_state(broker: Broker) -> dict[str, Any]:
    """What this worker shares with other hosts, and knows of them."""
    stats, catalog = broker.peers.stats(), broker.catalog
    asked = catalog.hits + catalog.misses
    return {
        "enabled": stats.enabled,
        "running": stats.running,
        "server_id": stats.server_id,
        "transport": {
            "protocols": stats.transports,
            "listening": stats.listening,
            "messages_sent": stats.packets_sent + stats.requests_sent,
            "messages_received": stats.packets_received + stats.packets_relayed,
            "messages_dropped": sum(stats.dropped.values()),
            "dropped_by_reason": stats.dropped,
            "own": stats.own,
            "events_sent": stats.events_sent,
            "events_received": stats.events_received,
            "requests_failed": stats.requests_failed,
        },
        "queue_config_cache": {
            "size": catalog.size,
            "hits": catalog.hits,
            "misses": catalog.misses,
            "hit_rate": round(catalog.hits / asked, 4) if asked else 0.0,
        },
        "server_health": {
            "servers_tracked": stats.servers_tracked,
            "servers_alive": stats.servers_alive,
            "servers_dead": stats.servers_dead,
            "heartbeats_received": stats.heartbeats_received,
            "restarts_detected": stats.restarts_detected,
        },
        "maintenance_mode": broker.modes.push_maintenance,
        "pop_maintenance_mode": broker.modes.pop_maintenance,
    }
